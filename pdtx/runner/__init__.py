"""Run transformers models over a PagedKVCache. Importing this does not import transformers."""

from pdtx.runner.checkpoint import fingerprint, resolve_model
from pdtx.runner.demo_model import DEMO_MODEL, demo_model_directory, demo_model_path
from pdtx.runner.runner import DTYPES, ModelRunner, greedy, prefill
from pdtx.runner.sequence import PagedSequence

__all__ = [
    "DEMO_MODEL",
    "DTYPES",
    "ModelRunner",
    "PagedSequence",
    "demo_model_directory",
    "demo_model_path",
    "fingerprint",
    "greedy",
    "prefill",
    "resolve_model",
]

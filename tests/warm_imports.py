"""What nodes import before they serve, but for the programs themselves. See warm.py."""

import importlib

for _module in (
    "pdtx.cli",
    "pdtx.engine",
    "pdtx.node.loop",
    "pdtx.node.watching",
    "pdtx.runner.paged",
    "pdtx.serving",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
):
    importlib.import_module(_module)

"""What nodes import before they serve, but for the programs themselves. See warm.py."""

import importlib

for _module in (
    "decode_node.loop",
    "decode_node.watching",
    "pdtx.cli",
    "pdtx.cli.tiers",
    "pdtx.engine",
    "pdtx.runner.paged",
    "pdtx.serving",
    "prefill_node.watching",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
):
    importlib.import_module(_module)

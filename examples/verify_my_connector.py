"""A connector of your own, held against what the two caches should contain afterwards.

The prefill side keeps tokens before heads (NHD), the decode side heads before tokens (HND). The connector below copies
pages; it forgets that for the keys. With --fixed it does not, and the check passes (exit code 0).
"""

import sys

import torch

import pdtx

LAYERS, HEADS, CHANNELS, BLOCK, BLOCKS = 2, 4, 64, 16, 12
FIXED = "--fixed" in sys.argv[1:]

# Two caches as an engine would have them: plain tensors.
prefill = torch.zeros(LAYERS, 2, BLOCKS, BLOCK, HEADS, CHANNELS, dtype=torch.bfloat16)
decode = torch.zeros(LAYERS, BLOCKS, 2, HEADS, BLOCK, CHANNELS, dtype=torch.bfloat16)


# -- the connector ---------------------------------------------------------------------------------------------------


def move_blocks(source_blocks: list[int], destination_blocks: list[int]) -> None:
    """Copy each block of the prompt, layer by layer, to its place in the decode cache."""
    for layer in range(LAYERS):
        for source, destination in zip(source_blocks, destination_blocks, strict=True):
            keys, values = prefill[layer, 0, source], prefill[layer, 1, source]
            decode[layer, destination, 1] = values.transpose(0, 1)
            if FIXED:
                decode[layer, destination, 0] = keys.transpose(0, 1)
            else:
                # The mistake: as many bytes, in the wrong order.
                decode[layer, destination, 0] = keys.reshape(HEADS, BLOCK, CHANNELS)


# -- the check -------------------------------------------------------------------------------------------------------

spec = pdtx.spec_of(num_layers=LAYERS, num_kv_heads=HEADS, head_size=CHANNELS, dtype="bfloat16", block_size=BLOCK)
report = pdtx.check_transfer(
    pdtx.cache_of(spec, "flash_attn_nhd", num_blocks=BLOCKS, memory=prefill),
    pdtx.cache_of(spec, "flashinfer_hnd", num_blocks=BLOCKS, memory=decode),
    move_blocks,
    source_blocks=[3, 7, 5],
    destination_blocks=[2, 1, 9],
    tokens=40,
)
print(report)
sys.exit(0 if report.ok else 1)

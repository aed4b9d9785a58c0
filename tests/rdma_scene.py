"""What a trial of RDMA moves: python -m tests.rdma_scene FOLDER writes a tiny model and prompts there."""

import json
import sys
from pathlib import Path
from typing import Any

from pdtx.runner.quiet import quiet_transformers
from tests.tiny_models import tiny_checkpoint

LENGTHS = (240, 33, 1)
"""Tokens of the prompts: 1.6 MiB of K/V, and the edges of blocks."""

SHAPE: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
}
"""Much K/V a token, little to compute: an emulated processor takes half a minute for what others do in 50 ms."""


def main() -> None:
    folder = Path(sys.argv[1])
    with quiet_transformers():
        model = tiny_checkpoint(folder, **SHAPE)
    model.rename(folder / "model")
    lines = [{"id": f"n{n}", "token_ids": [(7 * i + n) % 256 for i in range(n)]} for n in LENGTHS]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))


if __name__ == "__main__":
    main()

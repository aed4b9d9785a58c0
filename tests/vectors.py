"""Reference values of vLLM 0.22, where they lie beside the repository; tests/data holds the essential ones."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"

Case = dict[str, Any]


def load_cases(name: str) -> list[Case]:
    """Return the cases of a vector file; skip the test where it is absent."""
    path = _ROOT / os.environ.get("PDTX_VECTORS", "../shared/vectors") / name
    if not path.is_file():
        pytest.skip(f"no vectors at {path}; PDTX_VECTORS names their directory")
    cases: list[Case] = json.loads(path.read_text())["cases"]
    return cases


def load_essential(name: str) -> list[Case]:
    """Return the cases of a file in tests/data."""
    cases: list[Case] = json.loads((DATA / name).read_text())
    return cases

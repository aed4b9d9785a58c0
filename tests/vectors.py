"""Reference values of vLLM 0.22, where they lie beside the repository; tests/data holds the essential ones."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pdtx import kvspec

_ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"

Case = dict[str, Any]


def load_vectors(name: str) -> dict[str, list[Case]]:
    """Return the lists of cases of a vector file by their names; skip the test where it is absent."""
    path = _ROOT / os.environ.get("PDTX_VECTORS", "../shared/vectors") / name
    if not path.is_file():
        pytest.skip(f"no vectors at {path}; PDTX_VECTORS names their directory")
    content = json.loads(path.read_text())
    return {key: value for key, value in content.items() if isinstance(value, list)}


def load_cases(name: str) -> list[Case]:
    """Return the cases of a vector file; skip the test where it is absent."""
    return load_vectors(name)["cases"]


def load_essential(name: str) -> list[Case]:
    """Return the cases of a file in tests/data."""
    cases: list[Case] = json.loads((DATA / name).read_text())
    return cases


def load_essential_vectors(name: str) -> dict[str, list[Case]]:
    """Return the lists of cases of a file in tests/data by their names."""
    lists: dict[str, list[Case]] = json.loads((DATA / name).read_text())
    return lists


def make_spec(spec_class: str, fields: Case) -> kvspec.KVCacheSpec:
    """Return the spec of a vector: lists as tuples, and no head_size_v where vLLM has None."""
    given = {name: value for name, value in fields.items() if not (name == "head_size_v" and value is None)}
    if "shapes" in given:
        given |= {"shapes": tuple(tuple(shape) for shape in given["shapes"]), "dtypes": tuple(given["dtypes"])}
    made: kvspec.KVCacheSpec = getattr(kvspec, spec_class)(**given)
    return made


def field_differences(spec: kvspec.KVCacheSpec, fields: Case) -> dict[str, tuple[object, object]]:
    """Return the fields in which a spec differs from vLLM's: name -> (pdtx, vLLM)."""
    ours = {name: getattr(spec, name) for name in fields}
    plain = {name: json.loads(json.dumps(value)) for name, value in ours.items()}  # tuples as lists, enums as names
    return {name: (plain[name], value) for name, value in fields.items() if plain[name] != value}

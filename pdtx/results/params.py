"""The parameters of cases as text, and which of them a sweep varies."""

from collections.abc import Sequence
from typing import Any

import msgspec

from pdtx.results.model import Case
from pdtx.units import format_seconds

FIELDS = tuple(Case.__struct_fields__)
AMOUNTS = frozenset({"model", "kv_cache_dtype", "layers", "tokens", "batch"})
"""What says how many bytes a case moves. Cases that differ in it are not the same measurement."""

_ALL_IF_ZERO = frozenset({"depth", "layers_per_transfer"})


def parameters(case: Case) -> dict[str, Any]:
    """Return a case's parameters as JSON has them."""
    fields: dict[str, Any] = msgspec.to_builtins(case)
    return fields


def varied(cases: Sequence[Case]) -> list[str]:
    """Return the names of the parameters that are not the same in all cases, in the order of the fields."""
    found = [parameters(case) for case in cases]
    return [name for name in FIELDS if any(one[name] != found[0][name] for one in found)]


def row_label_names(cases: Sequence[Case]) -> list[str]:
    """Return the parameters that tell one of the cases from the others; the tokens where there is only one."""
    return varied(cases) or ["tokens"]


def label(name: str) -> str:
    """Return a parameter's name for a reader: 'layer_compute_s' -> 'layer compute'."""
    return name.removesuffix("_s").replace("_", " ")


def shown(case: Case, name: str) -> str:
    """Return one parameter for a table: pairs as 16:32, or 16 where both sides have the same."""
    value = getattr(case, name)
    if name == "block_tables":
        return "recorded" if value is not None else "-"
    if name == "mean_run":
        return "all" if value == 0 else f"{value:g}"
    if (name == "layers" and value is None) or (name in _ALL_IF_ZERO and value == 0):
        return "all"
    if name == "layer_compute_s":
        return format_seconds(value) if value else "-"
    if isinstance(value, tuple):
        return f"{value[0]}" if value[0] == value[1] else f"{value[0]}:{value[1]}"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ",".join(f"{key}={one}" for key, one in value.items()) or "-"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else f"{value}"


def named_case(case: Case, names: Sequence[str]) -> str:
    """Return the given parameters of a case as one label: 'tokens 2048, mover shm'."""
    return ", ".join(f"{label(name)} {shown(case, name)}" for name in names) or f"tokens {case.tokens}"


def flattened(facts: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested facts as one level: {"a": {"b": 1}} -> {"a.b": "1"}."""
    flat = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            flat.update(flattened(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = f"{value}"
    return flat

"""The flags of a sweep: what it measures, between whom and how, by the names that `pdtx bench` has for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pdtx.errors import InputError

DEFAULT_TOKENS = "128,512,2048"
DEFAULTS: Mapping[str, Any] = {
    "model": "llama-3-8b",
    "layers": "8",
    "batch": "1",
    "kv-cache-dtype": "auto",
    "block-size": "16",
    "layout": "flash_attn_nhd:flashinfer_nhd",
    "tp": "1",
    "mean-run": "1",
    "seed": 0,
    "mover": "tcp",
    "op": "push",
    "mode": "auto",
    "merge": "on",
    "depth": "all",
    "layers-per-transfer": "1",
    "layer-compute": "0",
    "prefill-agents": 1,
    "decode-agents": 1,
    "pattern": "pairs",
    "isolated": False,
    "device": "cpu",
    "connect-timeout": 60.0,
    "insecure": False,
    "iterations": 20,
    "warmup": 3,
    "verify": True,
    "reference": "auto",
    "deadline": 3600.0,
}
"""By flag, what counts where nothing else is given. Tokens: DEFAULT_TOKENS, unless one of SIZES is there."""

SIZES = ("tokens", "bytes", "block-tables")
PLACES = ("local", "prefill", "decode", "rendezvous")
REPEATED = frozenset({"mover-option", "peer-key", "label"})
_OTHERS = ("bytes", "block-tables", "mover-option", "streams", "local", "prefill", "decode", "max-bytes", "key")
_NAMES = ("tokens", *DEFAULTS, *_OTHERS, "peer-key", "label")
_BOUNDS = {"iterations": (1, 10**6), "warmup": (0, 10**6), "prefill-agents": (1, 1024), "decode-agents": (1, 1024)}
_BOUNDS |= {"seed": (0, 2**63 - 1)}
_LEAST_SECONDS = {"deadline": 1.0, "connect-timeout": 0.1}


@dataclass(frozen=True)
class Flags:
    """What counts, by long flag; those that were not given and have no default are absent."""

    values: Mapping[str, Any]

    def __getitem__(self, flag: str) -> Any:  # noqa: ANN401 - as its option has it
        return self.values.get(flag)

    def texts(self, flags: Sequence[str]) -> dict[str, str]:
        """Return those of flags that are there."""
        return {flag: str(self.values[flag]) for flag in flags if flag in self.values}

    def pairs(self, flag: str) -> dict[str, str]:
        """Return what KEY=VALUE texts of a flag say. Raises InputError for other texts, and a key given twice."""
        found = dict[str, str]()
        for text in self[flag] or ():
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                raise InputError(f"--{flag} takes KEY=VALUE, not {text!r}")
            if key.strip() in found:
                raise InputError(f"--{flag} has {key.strip()!r} twice")
            found[key.strip()] = value.strip()
        return found

    def as_config(self) -> dict[str, Any]:
        """Return them as YAML has them: lists for texts with commas."""
        return {flag: _plain(value) for flag, value in self.values.items()}


def _plain(value: Any) -> Any:  # noqa: ANN401 - as YAML has it
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [str(one) if isinstance(one, Path) else one for one in value]
    return value.split(",") if isinstance(value, str) and "," in value else value


def flags_of(config: str | Path | Mapping[str, Any] | None, given: Mapping[str, Any]) -> Flags:
    """Return the flags of a sweep from Python: given before config, and that before the defaults.

    config: a YAML file, a scenario's name, or a mapping. Keys are flags, with - or _; values are texts, numbers, or
    lists of them where the flag takes several. Raises InputError for a key that is no flag, naming the nearest, and for
    values that cannot be used.
    """
    if config is None or isinstance(config, Mapping):
        base = _named(config or {})
    else:
        from pdtx.bench.config import read_config

        base = dict(read_config(str(config), _NAMES, REPEATED))
    over = _named(given)
    for rivals in (SIZES, PLACES):
        if any(flag in over for flag in rivals):
            base = {flag: value for flag, value in base.items() if flag not in rivals}
    values = {**DEFAULTS, **base, **over}
    if not any(flag in values for flag in SIZES):
        values["tokens"] = DEFAULT_TOKENS
    return Flags({flag: _value(flag, values[flag]) for flag in _NAMES if flag in values})


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags by their own names, without those that are None. Raises InputError for one that is none."""
    found = dict[str, Any]()
    for key, value in given.items():
        flag = str(key).replace("_", "-")
        if flag not in _NAMES:
            near = get_close_matches(flag, _NAMES, n=1, cutoff=0.4)
            raise InputError(
                f"a sweep has no {key!r}; " + (f"the nearest is {near[0]}" if near else "see pdtx bench --help")
            )
        if value is not None:
            found[flag] = value
    return found


def _value(flag: str, value: Any) -> Any:  # noqa: ANN401 - texts, numbers, lists
    """Return a value as its flag has it: of the default's type, or text. Raises InputError."""
    if flag in REPEATED:
        pairs = [f"{key}={one}" for key, one in value.items()] if isinstance(value, Mapping) else value
        return [str(one) for one in pairs] if isinstance(pairs, list | tuple) else [str(pairs)]
    kind = type(DEFAULTS.get(flag, ""))
    if flag in ("block-tables", "key"):
        return Path(str(value))
    if kind is bool or flag == "local":
        return _switch(flag, value)
    try:
        if kind in (int, float):
            return _bounded(flag, kind(value))
    except (TypeError, ValueError):
        raise InputError(f"{flag} must be a number, not {value!r}") from None
    return ",".join(map(_text, value)) if isinstance(value, list | tuple) else _text(value)


def _text(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _switch(flag: str, value: object) -> bool:
    words = {"true": True, "false": False, "on": True, "off": False, "yes": True, "no": False}
    if str(value).lower() not in words:
        raise InputError(f"{flag} must be true or false, not {value!r}")
    return words[str(value).lower()]


def _bounded(flag: str, value: float) -> float:
    least, most = _BOUNDS.get(flag, (_LEAST_SECONDS.get(flag, float("-inf")), float("inf")))
    if not least <= value <= most:
        raise InputError(f"{flag} must lie in {least:g}..{most:g}, not {value!r}")
    return value

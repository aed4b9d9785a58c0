"""The flags of `pdtx bench` as they count: of the command line before the environment, a config file, and defaults."""

import os
from collections.abc import Sequence
from typing import Any

import typer

from pdtx.bench.flags import DEFAULT_TOKENS, PLACES, SIZES, Flags
from pdtx.cli.common import note

ENV_PREFIX = "PDTX_BENCH"

_NOT_KEPT = ("config", "print_config", "json", "help")
_SIZES = tuple(flag.replace("-", "_") for flag in SIZES)
_RANKING = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")


def load_config(ctx: typer.Context, source: str | None) -> str | None:
    """Make a config file's values the defaults of the other options: the callback of --config, which is read first."""
    if source is not None:
        from pdtx.bench.config import read_config

        names = _names(ctx)
        repeated = {flag for flag, name in names.items() if _option(ctx, name).multiple}
        found = read_config(source, list(names), repeated)
        ctx.default_map = {names[flag]: value for flag, value in found.items()}
    return source


def read_flags(ctx: typer.Context) -> Flags:
    """Return the flags that count, and say on stderr what in the environment is none."""
    names = _names(ctx)
    _tell_unknown(names.values())
    given = {name: value for name, value in ctx.params.items() if value not in (None, (), [])}
    for name in PLACES:  # a place that is not taken says nothing
        if given.get(name) is False:
            del given[name]
    for rivals in (_SIZES, PLACES):
        _prefer(ctx, given, rivals)
    if not any(name in given for name in _SIZES):
        given["tokens"] = DEFAULT_TOKENS
    return Flags({flag: given[name] for flag, name in names.items() if name in given})


def _prefer(ctx: typer.Context, given: dict[str, Any], rivals: Sequence[str]) -> None:
    """Drop of flags that exclude one another what a file says where the environment or the command line says one."""
    ranks = {name: _rank(ctx, name) for name in rivals if name in given}
    best = min(ranks.values(), default=len(_RANKING))
    for name, rank in ranks.items():
        if best < rank:
            del given[name]


def _rank(ctx: typer.Context, name: str) -> int:
    source = ctx.get_parameter_source(name)
    known = source.name if source is not None else ""
    return _RANKING.index(known) if known in _RANKING else len(_RANKING)


def _names(ctx: typer.Context) -> dict[str, str]:
    """Return from long flags to the names of their options, in the order of --help."""
    found = dict[str, str]()
    for option in ctx.command.params:
        if option.name is not None and option.name not in _NOT_KEPT:
            found[next(text for text in option.opts if text.startswith("--")).removeprefix("--")] = option.name
    return found


def _option(ctx: typer.Context, name: str) -> Any:  # noqa: ANN401 - typer's own type
    return next(option for option in ctx.command.params if option.name == name)


def _tell_unknown(names: Any) -> None:  # noqa: ANN401 - any iterable of names
    known = {f"{ENV_PREFIX}_{name.upper()}" for name in (*names, *_NOT_KEPT)}
    others = (f"{ENV_PREFIX}_TIER_",)
    for variable in sorted(os.environ):
        if variable.startswith(f"{ENV_PREFIX}_") and variable not in known and not variable.startswith(others):
            note(f"{variable} in the environment is no flag of pdtx bench; it is ignored")

"""Movers by name: those that come with pdtx, and others' through the entry point group "pdtx.movers"."""

from importlib import import_module
from importlib.metadata import entry_points

from pdtx.errors import InputError
from pdtx.transports.base import Mover

_GROUP = "pdtx.movers"

# Imported when asked for: a run with one mover need not load the others' libraries.
_BUILT_IN = {
    "inproc": "pdtx.transports.inproc:InprocMover",
    "nixl": "pdtx.transports.nixl.mover:NixlMover",
    "shm": "pdtx.transports.shm.mover:ShmMover",
    "tcp": "pdtx.transports.tcp:TcpMover",
    "ucx": "pdtx.transports.ucx.mover:UcxMover",
}


def mover_names() -> list[str]:
    """Return the names that make_mover knows here; what some of them need may not be installed."""
    return sorted({*_BUILT_IN, *entry_points(group=_GROUP).names})


def make_mover(name: str, **options: object) -> Mover:
    """Make a mover. options are those of its class.

    Raises InputError for an unknown name, an option the mover does not have, or a package that is not there.
    """
    cls = mover_class(name)
    try:
        mover = cls(**options)
    except TypeError as error:
        raise InputError(f"the options of mover {name!r}: {error}") from None
    if not isinstance(mover, Mover):
        raise InputError(f"the entry point {name!r} of {_GROUP} makes no Mover but a {type(mover).__name__}")
    return mover


def mover_class(name: str) -> type[Mover]:
    """Return the class of a mover. Raises InputError as make_mover does."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        built_in: type[Mover] = getattr(import_module(module), attribute)
        return built_in
    found = list(entry_points(group=_GROUP, name=name))
    if not found:
        raise InputError(f"unknown mover {name!r}; one of {', '.join(mover_names())}")
    try:
        loaded: type[Mover] = found[0].load()
    except (ImportError, AttributeError) as error:
        raise InputError(f"mover {name!r} of {found[0].value} does not load: {error}") from None
    return loaded

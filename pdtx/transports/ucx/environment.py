"""UCX's settings: they are environment variables, which it reads when it is loaded and when a context is made."""

import os

_OURS = {
    # Without it, error handling makes software carry out every put and get, on the peer's processor.
    "UCX_RNDV_THRESH": "inf",
    # UCX writes its warnings to standard output, where results go.
    "UCX_LOG_FILE": "stderr",
}
_PREFIX = "UCX_"
_ALSO = ("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY",)

_set_here = set[str]()


def prepare() -> None:
    """Set what pdtx needs and the user has not set. To be called before anything loads UCX."""
    for name, value in _OURS.items():
        set_default(name, value)


def set_default(name: str, value: str) -> None:
    """Set what the user has not set, and remember that."""
    if name not in os.environ:
        set_value(name, value)


def set_value(name: str, value: str) -> None:
    """Set what an option of pdtx's asks for, and remember that."""
    os.environ[name] = value
    _set_here.add(name)


def knobs() -> dict[str, str]:
    """Return the settings that UCX takes from this process's environment, by name: a part of every result."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIX) or name in _ALSO}


def set_by_pdtx() -> tuple[str, ...]:
    """Return the names of those that pdtx has set. (ucxx sets some too when it is imported.)"""
    return tuple(sorted(_set_here))


def setting(name: str, default: str) -> str:
    """Return a setting as the user would write it, for messages."""
    return f"{name}={os.environ[name]}" if name in os.environ else default

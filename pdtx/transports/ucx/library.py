"""Which libucp: the one of the registry's wheel, the system's, the one inside NIXL's wheel, or any file.

A process holds one UCX of a kind: libraries find each other by names like libucp.so.0, so that a second one with the
same names would be mixed with the first. NIXL's has names of its own and can be there beside another.
"""

import ctypes
import ctypes.util
import os
from importlib.util import find_spec
from pathlib import Path

from pdtx.errors import InputError
from pdtx.transports.ucx.libucp import Ucp

WHEEL, SYSTEM, NIXL = "wheel", "system", "nixl"

_NAME = "libucp.so.0"
_NIXL_PACKAGES = ("nixl_cu13", "nixl_cu12")
_WHEEL_NAMES = ("libucs.so", "libucs_signal.so", "libuct.so", "libucp.so")
"""In the order in which the package loads them. It has each file three times: any other name would load it again."""


def wheel_path() -> Path | None:
    """Return where the package libucx keeps its libucp, or None if it is not installed."""
    spec = find_spec("libucx")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "lib" / _WHEEL_NAMES[-1]
    return path if path.exists() else None


def nixl_path() -> Path | None:
    """Return where NIXL's wheel keeps its libucp, or None if there is none."""
    for package in _NIXL_PACKAGES:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent.parent / f"{package}.libs"
            if found := sorted(folder.glob("libucp-*.so*")):
                return found[0]
    return None


def system_path() -> Path | None:
    """Return where the loader finds libucp, or None if it does not. A library that is loaded already counts."""
    if ctypes.util.find_library("ucp") is None and not _in_search_path():
        return None
    loaded = mapped()
    try:
        ctypes.CDLL(_NAME)
    except OSError:
        return None
    fresh = [path for path in mapped() if path not in loaded] or [path for path in loaded if path.name == _NAME]
    return fresh[0] if fresh else None


def _in_search_path() -> bool:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return any(folder and (Path(folder) / _NAME).exists() for folder in folders)


def mapped() -> list[Path]:
    """Return the libucp files that this process has loaded, in the order of their addresses."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    paths = dict.fromkeys(Path(parts[5].strip()) for parts in lines if len(parts) == 6 and "/libucp" in parts[5])
    return list(paths)


def load(choice: str | None) -> Ucp:
    """Load the chosen libucp; None takes the first of wheel, system and nixl that is there.

    Raises InputError if it is not there, too old, or shut out by another that is loaded already.
    """
    path, origin = _find(choice)
    for other in mapped():
        if _stem(other) == _stem(path) and other.parent != path.parent:
            raise InputError(
                f"this process has loaded UCX from {other} and cannot load {path} too; use another process"
            )
        if _stem(other) == _stem(path):
            return Ucp(str(other), origin)
    if origin == WHEEL:
        for name in _WHEEL_NAMES:
            ctypes.CDLL(str(path.parent / name))
    return Ucp(str(path), origin)


def _stem(path: Path) -> str:
    """The part of a library's name that tells UCX's own from the one in NIXL's wheel."""
    return path.name.split(".so")[0]


def _find(choice: str | None) -> tuple[Path, str]:
    finders = {WHEEL: wheel_path, SYSTEM: system_path, NIXL: nixl_path}
    if choice is None:
        for name, finder in finders.items():
            if (path := finder()) is not None:
                return path, name
        raise InputError("no UCX is installed; install ucxx-cu12 or ucxx-cu13, or a system UCX >= 1.18")
    if choice in finders:
        if (path := finders[choice]()) is None:
            raise InputError(f"there is no UCX of kind {choice!r} here; {_advice(choice)}")
        return path, choice
    path = Path(choice)
    if path.is_dir():
        path /= _NAME
    if not path.exists():
        raise InputError(f"there is no UCX library {choice}; give wheel, system, nixl or a path to libucp.so.0")
    return path.resolve(), choice


def _advice(choice: str) -> str:
    if choice == WHEEL:
        return "install ucxx-cu12 or ucxx-cu13"
    if choice == NIXL:
        return "install nixl"
    return "the loader finds no libucp.so.0; set LD_LIBRARY_PATH or give its path"


def loaded_by(package: str, choice: str | None) -> Ucp:
    """Return the libucp that a Python package has loaded; NIXL's, which has another name, may be there as well.

    choice: where it should come from, or None. Raises InputError if it comes from elsewhere.
    """
    found = [path for path in mapped() if path.name.startswith("libucp.so")]
    if not found:
        raise InputError(f"{package} has loaded no libucp that pdtx can find; use runtime raw")
    origin = origin_of(found[0])
    if choice not in (None, origin):
        raise InputError(
            f"{package} has UCX from {found[0]}, not the {choice}'s: it was loaded before, or there is no other"
        )
    return Ucp(str(found[0]), origin)


def origin_of(path: Path) -> str:
    """Return where a loaded library comes from, for people."""
    for name, finder in ((WHEEL, wheel_path), (NIXL, nixl_path)):
        if (known := finder()) is not None and known.parent == path.parent:
            return name
    return SYSTEM

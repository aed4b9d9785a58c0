"""The end of a NIXL agent, without Python's lock.

NIXL's binding destroys an agent when its object goes, and holds the lock meanwhile. That may take long: a kernel may
need a minute to destroy queue pairs whose link is down (Soft-RoCE: 14 to 54 s). No thread of the process would run,
other connections would be lost for silence, and no deadline would be kept. So the destructor of NIXL's library is
called directly, which ctypes does without the lock.
"""

import ctypes
import struct
from itertools import pairwise
from typing import Any

_DESTRUCTOR = "_ZN9nixlAgentD1Ev"
"""nixlAgent::~nixlAgent()"""

_SEARCHED_BYTES = 1024


class Ender:
    """bindings: NIXL's module of them."""

    def __init__(self, bindings: object) -> None:
        try:
            self._destroy: Any = getattr(ctypes.CDLL(str(getattr(bindings, "__file__", ""))), _DESTRUCTOR)
        except (OSError, AttributeError):
            self._destroy = None
        else:
            self._destroy.argtypes, self._destroy.restype = (ctypes.c_void_p,), None

    def end(self, agent: Any) -> None:  # noqa: ANN401 - NIXL has no type hints that are worth the name
        """Destroy an agent of the package's own class, which nobody else may use from now on.

        Where NIXL is not built as expected nothing is done: then the agent ends with its last reference.
        """
        bound = getattr(agent, "agent", None)
        address = None if self._destroy is None else _address(bound, str(agent.name))
        if address is None:
            return
        # Both have to be kept from doing the same when they go.
        agent.agent = None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(bound))
        self._destroy(address)


def _address(bound: object, name: str) -> int | None:
    """Return where the C++ object of a binding's object lies; None unless its agent's name is found there.

    pybind11 puts the address behind the head of the Python object; what lies there points to the agent's data, and a
    std::string of them (address, length, ...) is the name.
    """
    head = object.__basicsize__
    address = _words(id(bound) + head, 8)
    data = _words(address[0], 8) if address else ()
    words = _words(data[0], _SEARCHED_BYTES) if data else ()
    found = any(length == len(name) and _memory(start, length) == name.encode() for start, length in pairwise(words))
    return address[0] if found else None


def _words(address: int, nbytes: int) -> tuple[int, ...]:
    found = _memory(address, nbytes)
    return struct.unpack(f"{len(found) // 8}Q", found)


def _memory(address: int, nbytes: int) -> bytes:
    """Return what lies there; nothing where this process has no memory: the kernel looks, so that nothing crashes."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            found = memory.read(nbytes)
    except (OSError, ValueError, OverflowError):
        return b""
    return found if len(found) == nbytes else b""

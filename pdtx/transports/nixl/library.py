"""NIXL, loaded when it is first needed, and the settings under which its UCX starts."""

import functools
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pdtx.errors import InputError
from pdtx.transports.nixl.ending import Ender
from pdtx.transports.nixl.protocols import ProtocolLog
from pdtx.transports.ucx.environment import set_by_pdtx
from pdtx.transports.ucx.library import mapped

BUNDLED = "libucp-"
"""How the name of the UCX inside NIXL's wheel begins."""

_settings = threading.Lock()
_loading = threading.Lock()


class Library:
    """The package nixl.

    ender: destroys agents. protocols: what its UCX says about the protocols that it chooses. mute: why it says nothing,
    empty if it does.
    """

    def __init__(self) -> None:
        """Raise InputError if there is no NIXL."""
        # Its own messages go to standard error and come back as exceptions here as well.
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        try:
            self._api = import_module("nixl._api")
            bindings = import_module("nixl._bindings")
        except ImportError as error:
            raise InputError(f"NIXL does not load ({error}); install the extra: pip install 'pdtx[nixl]'") from None
        self.ender = Ender(bindings)
        self.protocols = ProtocolLog()
        self.mute = _why_mute(self.protocols)
        self.failures = _errors_of(bindings)
        self.lost = _errors_of(bindings, "RemoteDisconnect", "Cancelled")
        self.unreadable = _errors_of(bindings, "Mismatch", "InvalidParam", "NotFound")
        self.in_progress, self.done = "PROC", "DONE"

    def __str__(self) -> str:
        try:
            return f"NIXL {version('nixl')}"
        except PackageNotFoundError:
            return "NIXL"

    # NIXL has no type hints that are worth the name.
    def agent(self, name: str, backend: str, num_threads: int, tls: str | None) -> Any:  # noqa: ANN401
        """Return a new agent of the package's own class.

        Raises InputError if there is no such backend here; whatever NIXL raises comes through, see failures.
        """
        # No thread of NIXL's own for progress: that one spins, a processor core for every agent that idles.
        config = self._api.nixl_agent_config(enable_prog_thread=False, num_threads=num_threads, backends=[backend])
        with self.settings(tls):
            agent = self._api.nixl_agent(name, config)
        if backend not in agent.backends:
            raise InputError(f"NIXL has no backend {backend!r} here; one of {', '.join(sorted(agent.plugin_list))}")
        return agent

    @contextmanager
    def settings(self, tls: str | None) -> Iterator[None]:
        """Set what UCX reads when a context is made (the first time also: when it is loaded), and only meanwhile.

        What the user has set stays, but for UCX_TLS where tls is given.
        """
        ours = {} if self.mute else self.protocols.settings()
        with _settings, _environment(ours | ({"UCX_TLS": tls} if tls is not None else {})):
            yield


def load() -> Library:
    """Return NIXL, the same for all. Raises InputError if it is not there."""
    # A cache alone lets two threads make one each, and UCX tells its protocols to one of them only.
    with _loading:
        return _load()


@functools.cache
def _load() -> Library:
    return Library()


def _why_mute(protocols: ProtocolLog) -> str:
    """Return why UCX does not tell us which protocols it chooses; empty if it does."""
    users = [name for name in protocols.settings() if name in os.environ and name not in set_by_pdtx()]
    if users:
        return f"which tells it elsewhere because of {users[0]}"
    if any(path.name.startswith(BUNDLED) for path in mapped()):
        return "whose log cannot be read, since something else has loaded its library before"
    return ""


def _errors_of(bindings: object, *kinds: str) -> tuple[type[Exception], ...]:
    """Return NIXL's exceptions; of some kinds, or all of them."""
    found = {name: kind for name, kind in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error")}
    wanted = [f"nixl{kind}Error" for kind in kinds] or sorted(found)
    return tuple(found[name] for name in wanted if name in found)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

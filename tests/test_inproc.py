"""What only the in-process mover can meet: sides that close while a connection comes about."""

from collections.abc import Callable

import pytest

from pdtx.errors import InputError, PdtxError, PeerUnreachable
from pdtx.testing import GrantingReceiver, MoverPair
from pdtx.testing.pair import Leaks
from pdtx.transports.inproc import InprocMover


class ClosesFirst(GrantingReceiver):
    """Lets something happen while it looks for a session's token."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None

    def admit(self, session_id: str) -> bytes:
        self.meanwhile()
        return super().admit(session_id)


@pytest.mark.parametrize(
    ("side", "error"), [("consumer", PeerUnreachable), ("producer", InputError)], ids=["consumer", "producer"]
)
def test_a_side_that_closes_while_a_connection_comes_about_has_none(side: str, error: type[PdtxError]) -> None:
    leaks, grants = Leaks(), ClosesFirst()
    with MoverPair(InprocMover, receiver=grants, grants=grants) as pair:
        grants.meanwhile = getattr(pair, side).close
        with pytest.raises(error):
            pair.connect()
    leaks.require_none("closing both sides")

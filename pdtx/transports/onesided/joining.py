"""The two links of a connection make each other's acquaintance over the control stream."""

from pdtx.errors import ProtocolError
from pdtx.transports.onesided.fabric import Link
from pdtx.transports.onesided.frames import ControlStream, Greeting


def join(link: Link[object], stream: ControlStream, deadline: float) -> None:
    """Exchange greetings and join the link.

    Raises PeerUnreachable, PeerLost, ProtocolError or DeadlineExceeded.
    """
    stream.send(Greeting(link.greeting()), deadline)
    message = stream.receive(deadline)
    if not isinstance(message, Greeting):
        raise ProtocolError(f"{stream.wire.peer} sent a {type(message).__name__} before its greeting")
    link.join(message.link, deadline)

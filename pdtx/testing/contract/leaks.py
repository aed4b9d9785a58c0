"""Addresses, and what is left when all is closed: nothing."""

import secrets
from dataclasses import replace

from pdtx.errors import AddressInUse, AuthenticationFailed, PeerUnreachable
from pdtx.testing.contract.subject import Subject, require_works, soon, start
from pdtx.testing.pair import Leaks, require, require_error
from pdtx.testing.receivers import GrantingReceiver
from pdtx.testing.scene import Scene


def check_addresses(subject: Subject) -> None:
    """A taken address is refused; it can be listened at again after a close; nobody there is an error."""
    with subject.pair() as pair:
        require_works(pair, pair.connect())
        rival = subject.make()
        try:
            require_error(AddressInUse, "a taken address", lambda: rival.listen(pair.address, GrantingReceiver()))
        finally:
            rival.close()
        address = pair.address
        # Who closes first is left with the connections' remains.
        pair.consumer.close()
    again = replace(subject, listen_at=address)
    with again.pair() as pair:
        require(pair.address == address, f"listening at {address} was advertised as {pair.address}")
        require_works(pair, pair.connect())
    producer = subject.make()
    try:
        call = lambda: producer.connect(address, "session", secrets.token_bytes(32), soon(2.0))  # noqa: E731
        require_error(PeerUnreachable, "an address at which nobody listens", call)
    finally:
        producer.close()


def check_nothing_left(subject: Subject) -> None:
    """After close() no thread and no descriptor is left, also of connections and sessions that failed."""
    leaks = Leaks()
    for seed in range(3):
        with subject.pair() as pair:
            connections = [pair.connect(f"session-{i}") for i in range(3)]
            scene = Scene(seed=seed)
            start(pair, connections[0], scene, scene.plan(), "session-0").wait()
            connections[1].close()
            bad = lambda pair=pair: pair.producer.connect(pair.address, "nobody", secrets.token_bytes(32), soon())  # noqa: E731
            require_error(AuthenticationFailed, "an unknown session", bad)
        pair.close()
        leaks.require_none("close()")


def check_sessions_end_is_heard(subject: Subject) -> None:
    """The receiver hears once of the end of each session's connection."""
    with subject.pair() as pair:
        connection = pair.connect("brief")
        require_works(pair, connection, "brief")
        connection.close()
        pair.grants.wait_for(lambda: bool(pair.grants.ended), "the end of a session")
    sessions = [session_id for session_id, _ in pair.grants.ended]
    require(sessions == ["brief"], f"the ends heard of are {sessions}, of one connection of session 'brief'")


def check_hundreds_of_connections(subject: Subject) -> None:
    """Many connections that come, work now and then, and go, leave nothing; most at once are ten."""
    with subject.pair() as pair:
        require_works(pair, pair.connect())
        leaks = Leaks()
        for _ in range(subject.connections // 10):
            connections = [pair.connect() for _ in range(10)]
            require_works(pair, connections[0])
            for connection in connections:
                connection.close()
        leaks.require_none(f"{subject.connections} connections", patience_s=5.0)

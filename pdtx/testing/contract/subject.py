"""The mover under test, and what every check does with it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdtx.plan import TransferPlan
from pdtx.testing.pair import LISTEN_AT, PATIENCE_S, MakeMover, MoverPair
from pdtx.testing.receivers import FaultyReceiver, Gate, GrantingReceiver
from pdtx.testing.scene import BufferScene, Scene
from pdtx.transports import Connection, Placement, TransferHandle, make_mover


@dataclass(frozen=True)
class Subject:
    """The mover under test: how to make one, and an address at which it can listen.

    name, options: what make_mover() takes for the same mover, for checks that need one in a process of its own.
    shared: such checks use memory that other processes of this host can be let map.
    connections: how many are opened and closed to find what they leave; fewer for a mover that takes long over one.
    """

    make: MakeMover
    listen_at: str = LISTEN_AT
    name: str | None = None
    options: dict[str, object] = field(default_factory=dict)
    shared: bool = False
    connections: int = 300

    @classmethod
    def named(cls, name: str, listen_at: str = LISTEN_AT, **options: object) -> "Subject":
        """Return a mover that make_mover() knows."""
        return cls(lambda: make_mover(name, **options), listen_at, name, options)

    def pair(self) -> MoverPair:
        """Return a fresh pair."""
        return MoverPair(self.make, self.listen_at)

    def faulty_pair(self, grants: GrantingReceiver, **hooks: Callable[..., None]) -> MoverPair:
        """Return a fresh pair whose receiver calls hooks first, see FaultyReceiver."""
        return MoverPair(self.make, self.listen_at, FaultyReceiver(grants, **hooks), grants)

    def held_pair(self, gate: Gate) -> MoverPair:
        """Return a fresh pair whose receiver waits at gate before it places or offers anything."""
        hold: Callable[[object], None] = lambda _: gate.hold()  # noqa: E731
        return self.faulty_pair(GrantingReceiver(), before_place=hold, before_offer=hold)


Check = Callable[[Subject], None]


def soon(seconds: float = PATIENCE_S) -> float:
    """Return the deadline so many seconds from now."""
    return time.monotonic() + seconds


def large_scene() -> Scene:
    """More than kernels buffer: while the receiver does not take it, nothing behind it can have begun."""
    return Scene(num_layers=4, tokens=1500, heads=8, head_size=128, block_sizes=(64, 64))


def start(
    pair: MoverPair,
    connection: Connection,
    scene: BufferScene,
    plan: TransferPlan,
    session_id: str = "session",
    *,
    staged: bool = False,
) -> TransferHandle:
    """Grant a plan to a session and put it; scene expects it from now on."""
    pair.grants.grant(session_id, scene.key(plan), scene.placement(plan))
    scene.moved(plan)
    return connection.put(scene.key(plan), scene.src.region, plan.flat, soon(), staged=staged)


def start_get(
    pair: MoverPair, connection: Connection, scene: BufferScene, plan: TransferPlan, session_id: str = "session"
) -> TransferHandle:
    """Offer a plan to a session and get it; scene expects it from now on."""
    offer(pair, scene, plan, session_id)
    scene.moved(plan)
    return get(connection, scene, plan)


def offer(pair: MoverPair, scene: BufferScene, plan: TransferPlan, session_id: str = "session") -> None:
    """Let a session get a plan's bytes."""
    pair.grants.grant_get(session_id, scene.key(plan), Placement(scene.src.region, plan.flat.source()))


def get(connection: Connection, scene: BufferScene, plan: TransferPlan, seconds: float = PATIENCE_S) -> TransferHandle:
    """Get a plan's bytes, whether they are offered or not."""
    return connection.get(scene.key(plan), scene.dst.region, plan.flat, soon(seconds))


def require_works(pair: MoverPair, connection: Connection, session_id: str = "session") -> None:
    """Put a whole request of its own, get another one, and check that all has come and was heard of."""
    put, got = Scene(seed=99), Scene(seed=98)
    grants, heard = pair.grants, len(pair.grants.given)
    start(pair, connection, put, put.plan(), session_id).wait()
    start_get(pair, connection, got, got.plan(), session_id).wait()
    for scene in (put, got):
        scene.require_exact()
    key = got.key(got.plan())
    grants.wait_for(lambda: key in (placed.key for placed in grants.given[heard:]), f"offered() for {key}")

"""What must not be moved is refused, in words, and does no harm to anything else."""

import itertools
import secrets

import numpy as np

from pdtx.errors import AuthenticationFailed, PdtxError, PlanError, TransferError, TransferRefused
from pdtx.plan import Runs, Slices, TransferPlan
from pdtx.testing.contract.subject import Subject, require_works, soon, start
from pdtx.testing.pair import MoverPair, require, require_error
from pdtx.testing.receivers import GrantingReceiver
from pdtx.testing.scene import Scene
from pdtx.transports import Connection, Placement, TransferState


def check_wrong_token(subject: Subject) -> None:
    """A wrong token and an unknown session are refused, without harm to who knows the token."""
    with subject.pair() as pair:
        pair.grants.add_session("guarded", secrets.token_bytes(32))
        for session_id in ("guarded", "unknown"):
            require_error(
                AuthenticationFailed,
                f"a wrong token for session {session_id}",
                lambda s=session_id: pair.producer.connect(pair.address, s, secrets.token_bytes(32), soon()),  # type: ignore[misc]
            )
        require_works(pair, pair.connect())


def _refused(pair: MoverPair, connection: Connection, scene: Scene, plan: TransferPlan, what: str) -> PdtxError:
    handle = connection.put(scene.key(plan), scene.src.region, plan.flat, soon())
    error = require_error(TransferRefused, what, handle.wait)
    require(handle.state is TransferState.FAILED, f"{what}: the transfer is {handle.state.name}")
    scene.require_exact()
    require_works(pair, connection)
    return error  # type: ignore[return-value]


def check_no_grant(subject: Subject) -> None:
    """Without a grant a transfer is refused with the receiver's words, and the connection stays usable."""
    with subject.pair() as pair:
        connection = pair.connect()
        scene = Scene(num_layers=4, tokens=2000, heads=8, head_size=64)
        error = _refused(pair, connection, scene, scene.plan(), "a transfer nobody granted")
        require("nothing was granted" in str(error), f"the receiver's reason is lost: {error}")
        require(len(pair.grants.heard) == 1, "placed() was called for a payload that was never placed")


def check_other_sessions_grant(subject: Subject) -> None:
    """A grant to one session cannot be used by another."""
    with subject.pair() as pair:
        pair.connect("owner")
        thief = pair.connect()
        scene = Scene()
        plan = scene.plan()
        pair.grants.grant("owner", scene.key(plan), scene.placement(plan))
        _refused(pair, thief, scene, plan, "a transfer with another session's grant")


def check_size_differs(subject: Subject) -> None:
    """A payload larger or smaller than the consumer's plan is refused; not one byte of it is written."""
    with subject.pair() as pair:
        connection = pair.connect()
        for seed, granted in enumerate((range(18), range(19))):
            scene = Scene(seed=seed)
            plan = scene.plan(tokens=range(19 - seed))
            other = scene.plan(tokens=granted)
            pair.grants.grant("session", scene.key(plan), scene.placement(other))
            heard = len(pair.grants.heard)
            _refused(pair, connection, scene, plan, "a payload of another size than planned")
            placed = pair.grants.heard[heard]
            require(placed.key == scene.key(plan), "placed() was not called for a payload of another size")
            require(placed.error is not None, "placed() reported no error for a payload of another size")


def check_placement_outside(subject: Subject) -> None:
    """A placement that leaves the receiver's region is refused before a byte is written."""
    with subject.pair() as pair:
        connection = pair.connect()
        for seed, shift in enumerate((1 << 20, -(1 << 20))):
            scene = Scene(seed=seed)
            plan = scene.plan()
            there = plan.flat.destination()
            offsets = there.offsets.copy()
            offsets[len(offsets) // 2] += shift
            placement = Placement(scene.dst.region, Slices(offsets, there.nbytes))
            pair.grants.grant("session", scene.key(plan), placement)
            _refused(pair, connection, scene, plan, "a placement outside the region")


def check_source_outside(subject: Subject) -> None:
    """put() refuses runs that leave the source's region."""
    with subject.pair() as pair:
        connection = pair.connect()
        scene = Scene()
        plan = scene.plan()
        for shift in (scene.src.region.nbytes, -scene.src.region.nbytes):
            runs = Runs(plan.flat.src + np.int64(shift), plan.flat.dst, plan.flat.nbytes)
            require_error(
                PlanError,
                "runs outside the source",
                lambda runs=runs: connection.put(scene.key(plan), scene.src.region, runs, soon()),  # type: ignore[misc]
            )
        require_works(pair, connection)


def check_failing_receiver(subject: Subject) -> None:
    """A receiver that raises what it should not fails that transfer alone."""
    grants = GrantingReceiver()
    calls = itertools.count()

    def fail_first(_: object) -> None:
        if next(calls) == 0:
            raise RuntimeError("on purpose")

    for hooks in ("before_place", "before_placed"):
        calls = itertools.count()
        with subject.faulty_pair(grants, **{hooks: fail_first}) as pair:
            connection = pair.connect()
            scene = Scene()
            handle = start(pair, connection, scene, scene.plan())
            require_error(TransferError, f"a receiver failing in {hooks[7:]}()", handle.wait)
            require_works(pair, connection)

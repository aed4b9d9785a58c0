"""Cancelled transfers in the middle of a queue: their bytes never cross, and what is queued behind them goes on."""

from pdtx.testing.contract.subject import Subject, get, large_scene, offer, require_works, soon, start
from pdtx.testing.pair import require
from pdtx.testing.receivers import Gate, GrantingReceiver, Placed
from pdtx.testing.scene import Scene
from pdtx.transports import TransferHandle, TransferKey, TransferState

_WAITING = 60
"""More than movers ask for ahead of time."""


def check_cancels_in_a_queue(subject: Subject) -> None:
    """Of many puts that wait two of three are cancelled: the others arrive, in order, and so does a notice behind."""
    _check(subject, gets=False)


def check_get_cancels_in_a_queue(subject: Subject) -> None:
    """Of many gets that wait two of three are cancelled: the others arrive, and so does a notice behind."""
    _check(subject, gets=True)


def _check(subject: Subject, *, gets: bool) -> None:
    gate, grants, asked = Gate(), GrantingReceiver(), list[TransferKey]()

    def hold(key: TransferKey) -> None:
        gate.hold()
        asked.append(key)

    with subject.faulty_pair(grants, before_place=hold, before_offer=hold) as pair:
        connection = pair.connect()
        first = large_scene()
        moving = start(pair, connection, first, first.plan())
        gate.wait_reached()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(1, _WAITING + 1)]
        keys, handles = [scene.key(scene.plan()) for scene in scenes], list[TransferHandle]()
        for scene in scenes:
            if gets:
                offer(pair, scene, scene.plan())
                handles.append(get(connection, scene, scene.plan()))
            else:
                plan = scene.plan()
                pair.grants.grant("session", scene.key(plan), scene.placement(plan))
                handles.append(connection.put(scene.key(plan), scene.src.region, plan.flat, soon()))
        notice = connection.notify(b"behind", soon())
        kept = range(0, _WAITING, 3)
        cancelled = [number for number in range(_WAITING) if number not in kept]
        for number in cancelled:
            require(handles[number].cancel(), f"transfer {number} of those that wait could not be cancelled")
        for number in kept:
            scenes[number].moved(scenes[number].plan())
        gate.open()
        for handle in (moving, *(handles[number] for number in kept), notice):
            handle.wait()
        require_works(pair, connection)
        for number, scene in enumerate(scenes):
            scene.require_exact()
            ended = TransferState.DONE if number in kept else TransferState.ABORTED
            require(handles[number].state is ended, f"transfer {number} is {handles[number].state.name}")
        first.require_exact()
        heard = grants.given if gets else grants.heard
        _require_balance(grants, heard, asked, keys)
        arrived = [placed.key for placed in heard if placed.error is None and placed.key in keys]
        require(arrived == [keys[number] for number in kept], f"the receiver heard of {arrived} as arrived")


def _require_balance(
    grants: GrantingReceiver, heard: list[Placed], asked: list[TransferKey], keys: list[TransferKey]
) -> None:
    """Each transfer that the receiver was asked for, cancelled ones too, must have ended there once."""
    expected = sorted(str(key) for key in asked if key in keys)
    ends: list[str] = []

    def balanced() -> bool:
        ends[:] = sorted(str(placed.key) for placed in heard if placed.key in keys)
        return len(ends) >= len(expected)

    grants.wait_for(balanced, "the ends of all transfers that the receiver was asked for")
    require(ends == expected, f"the receiver was asked for {expected}, and heard the end of {ends}")

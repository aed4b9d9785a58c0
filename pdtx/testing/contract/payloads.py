"""Payloads arrive exactly, whatever their shape, number and way."""

import itertools

import numpy as np
import torch

from pdtx.layout import LAYOUT_ORDERS
from pdtx.plan import Runs
from pdtx.testing.contract.subject import Subject, require_works, soon, start, start_get
from pdtx.testing.pair import MoverPair, require
from pdtx.testing.scene import Scene
from pdtx.transports import Connection, Placement, Region, TransferHandle, TransferKey

_LAYOUT_PAIRS = [(src, dst) for src in LAYOUT_ORDERS for dst in LAYOUT_ORDERS]


def check_every_layout_pair(subject: Subject) -> None:
    """Scattered runs arrive exactly where the consumer's plan wants them, and no other byte changes."""
    with subject.pair() as pair:
        connection = pair.connect()
        for seed, (layouts, sizes) in enumerate(itertools.product(_LAYOUT_PAIRS, ((4, 4), (4, 8), (8, 4)))):
            scene = Scene(layouts, block_sizes=sizes, seed=seed)
            start(pair, connection, scene, scene.plan()).wait()
            scene.require_exact()


def check_partial_ranges(subject: Subject) -> None:
    """Some layers and some tokens of a request arrive alone, down to one token of one layer."""
    with subject.pair() as pair:
        connection = pair.connect()
        for layers, tokens in ((range(1, 3), range(5, 18)), (range(1), range(3, 4)), (range(3), range(16, 19))):
            scene = Scene(seed=tokens.start)
            start(pair, connection, scene, scene.plan(layers, tokens)).wait()
            scene.require_exact()


def check_many_ranges_in_one_call(subject: Subject) -> None:
    """Thousands of small runs, more than one system call takes, and more bytes than a socket holds."""
    with subject.pair() as pair:
        scene = Scene(num_layers=2, tokens=2003, heads=8, head_size=64, block_sizes=(16, 32))
        start(pair, pair.connect(), scene, scene.plan()).wait()
        scene.require_exact()


def check_many_at_once(subject: Subject) -> None:
    """64 transfers put without waiting all arrive, in the order of their puts."""
    with subject.pair() as pair:
        connection = pair.connect()
        scenes = [Scene(seed=seed, num_layers=1) for seed in range(64)]
        handles = [start(pair, connection, scene, scene.plan()) for scene in scenes]
        for handle, scene in zip(handles, scenes, strict=True):
            handle.wait()
            scene.require_exact()
        order = [placed.key for placed in pair.grants.heard]
        require(
            order == [handle.key for handle in handles], "transfers arrived in another order than that of their puts"
        )


def check_many_at_once_over_several_peers(subject: Subject) -> None:
    """Puts and gets of several sessions with several consumers at once: 48 transfers, all exact."""
    movers, pairs = [subject.make() for _ in range(2)], [subject.pair() for _ in range(2)]
    try:
        ways = [
            (pair, pair.connect(f"session-{number}", mover), f"session-{number}")
            for pair in pairs
            for number, mover in enumerate(movers)
        ]
        scenes, handles = [Scene(seed=seed, num_layers=2) for seed in range(48)], list[TransferHandle]()
        for number, scene in enumerate(scenes):
            begin = start if number % 3 else start_get
            pair, connection, session_id = ways[number % len(ways)]
            handles.append(begin(pair, connection, scene, scene.plan(), session_id))
        for handle, scene in zip(handles, scenes, strict=True):
            handle.wait()
            scene.require_exact()
    finally:
        for mover in movers:
            mover.close()
        for pair in pairs:
            pair.close()


def check_layer_by_layer(subject: Subject) -> None:
    """A request put one layer at a time, some layers by others' gets, is complete; what was left out is untouched."""
    with subject.pair() as pair:
        connection, scene = pair.connect(), Scene(num_layers=8)
        handles = [
            begin(pair, connection, scene, scene.plan(range(layer, layer + 1)))
            for layer, begin in ((0, start), (1, start), (3, start_get), (4, start), (6, start_get), (7, start))
        ]
        for handle in handles:
            handle.wait()
        scene.require_exact()


def check_several_producers(subject: Subject) -> None:
    """Producers with sessions of their own do not disturb each other at one consumer."""
    movers = [subject.make() for _ in range(3)]
    try:
        with subject.pair() as pair:
            connections = [pair.connect(f"session-{i}", mover) for i, mover in enumerate(movers)]
            scenes = [Scene(seed=seed) for seed in range(12)]
            handles = [
                start(pair, connections[i % 3], scene, scene.plan(), f"session-{i % 3}")
                for i, scene in enumerate(scenes)
            ]
            for handle, scene in zip(handles, scenes, strict=True):
                handle.wait()
                scene.require_exact()
    finally:
        for mover in movers:
            mover.close()


def check_several_consumers(subject: Subject) -> None:
    """One producer serves several consumers; each gets what was put to it."""
    producer = subject.make()
    pairs = [subject.pair() for _ in range(3)]
    try:
        connections = [pair.connect("session", producer) for pair in pairs]
        scenes = [Scene(seed=seed) for seed in range(12)]
        handles = [start(pairs[i % 3], connections[i % 3], scene, scene.plan()) for i, scene in enumerate(scenes)]
        for handle, scene in zip(handles, scenes, strict=True):
            handle.wait()
            scene.require_exact()
    finally:
        producer.close()
        for pair in pairs:
            pair.close()


def check_empty_transfer(subject: Subject) -> None:
    """A transfer of no bytes ends as DONE."""
    with subject.pair() as pair:
        connection = pair.connect()
        scene = Scene()
        start(pair, connection, scene, scene.plan(tokens=range(5, 5), layers=range(1))).wait()


def _move_blocks(pair: MoverPair, connection: Connection, block: int, count: int, staged: bool) -> None:
    """Put count blocks of random bytes, each to another place, and compare all of the memory."""
    random = np.random.default_rng(block)
    source = torch.from_numpy(random.integers(0, 256, block * count, np.uint8))
    region = Region(torch.zeros(block * (count + 1), dtype=torch.uint8))
    src = np.arange(count, dtype=np.int64) * block
    dst = (random.permutation(count).astype(np.int64) + 1) * block
    runs = Runs(src, dst, np.full(count, block, np.int64))
    key = TransferKey(f"blocks-of-{block}", 0, 1, 0, count)
    pair.grants.grant("session", key, Placement(region, runs.destination()))
    connection.put(key, Region(source), runs, soon(), staged=staged).wait()
    moved = region.memory.view(count + 1, block)[torch.from_numpy(dst // block)]
    require(torch.equal(moved.reshape(-1), source), f"{count} blocks of {block} bytes arrived changed, staged={staged}")
    require(not region.memory[:block].any(), "bytes were written that belong to no transfer")


def check_staged(subject: Subject) -> None:
    """put(staged=True) moves the same bytes to the same places, for every pair of layouts."""
    with subject.pair() as pair:
        connection = pair.connect()
        for seed, layouts in enumerate(_LAYOUT_PAIRS):
            scene = Scene(layouts, seed=seed)
            start(pair, connection, scene, scene.plan(), staged=True).wait()
            scene.require_exact()


def check_staged_in_pieces(subject: Subject) -> None:
    """Payloads larger than any staging buffer, of small blocks, odd ones, and one block larger than a buffer."""
    with subject.pair() as pair:
        connection = pair.connect()
        for block, count in ((4096, 5000), (1021, 2000), (20 << 20, 1)):
            for staged in (True, False):
                _move_blocks(pair, connection, block, count, staged)


def check_path(subject: Subject) -> None:
    """The kind of what carries the payload is known when connect() has returned; only details may come later."""
    with subject.pair() as pair:
        connection = pair.connect()
        before = connection.path
        require(before.kind in ("rdma", "tcp", "shm", "inproc", "other"), f"{before.kind!r} is no kind of path")
        require(
            before.kind in before.possible, f"the kind {before.kind} is not among those possible: {before.possible}"
        )
        require(before.kind in str(before), f"the path {str(before)!r} does not name its kind {before.kind}")
        require(before.detail in str(before) and bool(before.detail), f"the path {str(before)!r} says nothing more")
        require_works(pair, connection)
        after = connection.path
        require(
            (after.kind, after.possible) == (before.kind, before.possible),
            f"the path was {before}, and after a transfer {after}",
        )


def check_register_twice(subject: Subject) -> None:
    """A region can be registered before its first transfer, twice at no cost, and used then; or not at all."""
    with subject.pair() as pair:
        connection, scene = pair.connect(), Scene()
        for mover, region in ((pair.producer, scene.src.region), (pair.consumer, scene.dst.region)):
            first = mover.register(region)
            require(mover.register(region) == first, "registering a region again gave another answer than before")
            if first is not None:
                require(first.nbytes >= region.nbytes, f"{first.nbytes} of {region.nbytes} bytes were registered")
                require(first.seconds >= 0, f"registering took {first.seconds} s")
        start(pair, connection, scene, scene.plan()).wait()
        scene.require_exact()
        require_works(pair, connection)


def check_two_connections_of_one_session(subject: Subject) -> None:
    """Two connections of one session work side by side; closing one leaves the other alone."""
    with subject.pair() as pair:
        connections = [pair.connect("session"), pair.connect("session")]
        scenes = [Scene(seed=seed) for seed in range(12)]
        handles = [start(pair, connections[i % 2], scene, scene.plan()) for i, scene in enumerate(scenes)]
        for handle, scene in zip(handles, scenes, strict=True):
            handle.wait()
            scene.require_exact()
        connections[0].close()
        require_works(pair, connections[1])
        pair.grants.wait_for(lambda: bool(pair.grants.ended), "the end of one connection")
        require(len(pair.grants.ended) == 1, "closing one connection of a session ended the other one")

"""Engines whose layers and ranks are split over processes in any way: each byte at its place once, whatever is lost.

`PDTX_EXAMPLES=54000 pytest tests/test_split_properties.py` looks at that many requests, by chance.
"""

import os

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pdtx.engine.coverage import require_all_received, require_all_sent
from pdtx.engine.matching import match_caches
from pdtx.errors import IncompatiblePeer
from pdtx.plan import PlanCache
from tests.plan_oracle import POISON
from tests.split_oracle import SplitScene
from tests.split_scenes import split_scenes
from tests.split_transfer import Delivery

_MANY = os.environ.get("PDTX_EXAMPLES")
pytestmark = pytest.mark.timeout(0 if _MANY else 120)
examples = settings(max_examples=int(_MANY), derandomize=False, database=None) if _MANY else settings()


@examples
@given(split_scenes(), st.integers(0, 2))
def test_every_byte_of_every_process_arrives_once(scene: SplitScene, losses: int) -> None:
    """Though sessions are lost, and only what is missing is sent again."""
    matches = [[match_caches(source.facts, each.facts) for each in scene.destinations] for source in scene.sources]
    for of_source in matches:
        require_all_sent(of_source)
    plans = PlanCache()
    sources = [scene.source(process) for process in scene.sources]
    for number, process in enumerate(scene.destinations):
        random = np.random.default_rng([scene.seed, number])
        delivery = Delivery(scene, process, [of_source[number] for of_source in matches], random, plans)
        require_all_received(delivery.matches)
        delivery.deliver(sources, losses)
        for at, expected in scene.expected(process).items():
            assert np.array_equal(delivery.memory[at], expected)
            assert np.array_equal(delivery.times[at], (expected != POISON).astype(np.int32)), "bytes written twice"
        check_incomplete(delivery)


def check_incomplete(delivery: Delivery) -> None:
    """An engine that lacks a process, or has one twice, is refused if and only if that process sends something."""
    matches = delivery.matches
    at = int(delivery.random.integers(len(matches)))
    # Whether of this request or of another, of which more moves.
    sends = any(one.moves and one.layer_index for one in matches[at].buffers)
    event(f"a process that is lacking sends something: {sends}")
    for wrong in ([*matches[:at], *matches[at + 1 :]], [*matches, matches[at]]):
        if not wrong:
            continue
        if sends:
            with pytest.raises(IncompatiblePeer):
                require_all_received(wrong)
        else:
            require_all_received(wrong)

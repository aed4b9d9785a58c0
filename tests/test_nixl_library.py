"""Loading NIXL, by a stand-in for what is loaded: needs no NIXL."""

import functools
import threading

import pytest

from pdtx.transports.nixl import library


def test_two_threads_that_load_it_first_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would have a log of UCX's of its own, and UCX writes into one of them only."""
    loading, go, loaded = threading.Event(), threading.Event(), list[object]()

    class Slow:
        def __init__(self) -> None:
            loading.set()
            assert go.wait(20)

    def load() -> None:
        loaded.append(library.load())

    monkeypatch.setattr(library, "_load", functools.cache(Slow))
    first, second = (threading.Thread(target=load) for _ in range(2))
    first.start()
    assert loading.wait(20)
    second.start()
    second.join(0.2)  # for it to load one, too, if it can
    go.set()
    first.join()
    second.join()
    assert loaded[0] is loaded[1]

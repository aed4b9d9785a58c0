"""Agents of NIXL end without Python's lock, once, and only where NIXL is built as expected."""

import subprocess
import sys
from textwrap import dedent
from types import SimpleNamespace

import pytest

from pdtx.transports.nixl import ending
from pdtx.transports.nixl.ending import Ender
from pdtx.transports.nixl.library import load
from tests.nixl_links import needs_nixl

pytestmark = needs_nixl
NAME = "an-agent-with-a-name-that-can-be-found"


def test_an_agent_is_found_by_its_name_and_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load()
    agent = library.agent(NAME, "UCX", 0, "tcp")
    bound, destroyed = agent.agent, list[int]()
    address = ending._address(bound, NAME)
    assert address is not None
    assert ending._address(bound, NAME[:-1]) is None
    assert ending._address(object(), NAME) is None
    destroy = library.ender._destroy

    def counted(where: int) -> None:
        destroyed.append(where)
        destroy(where)

    monkeypatch.setattr(library.ender, "_destroy", counted)
    count = sys.getrefcount(bound)
    library.ender.end(agent)
    assert destroyed == [address]
    assert agent.agent is None
    # One reference went with the agent, and one is never given back: else the binding would destroy it again.
    assert sys.getrefcount(bound) == count
    library.ender.end(agent)
    assert destroyed == [address]


def test_where_nixl_is_built_otherwise_an_agent_ends_with_its_last_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[str]()

    class Bound:
        def __del__(self) -> None:
            ended.append("bound")

    for ender in (load().ender, Ender(SimpleNamespace()), Ender(SimpleNamespace(__file__="libc.so.6"))):
        agent = SimpleNamespace(agent=Bound(), name=NAME)
        ender.end(agent)
        assert agent.agent is not None
        del agent
        assert ended.pop() == "bound"


def test_other_threads_run_while_an_agent_ends() -> None:
    """With a semaphore for an agent, which another thread of Python has to raise: with the lock this never ends."""
    program = """
        import ctypes, threading, types
        from pdtx.transports.nixl import ending

        libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.sem_init(semaphore, 0, 0)
        ending._DESTRUCTOR = "sem_wait"
        ending._address = lambda bound, name: ctypes.addressof(semaphore)
        ender = ending.Ender(types.SimpleNamespace(__file__="libc.so.6"))
        threading.Timer(0.2, lambda: libc.sem_post(semaphore)).start()
        ender.end(types.SimpleNamespace(agent=object(), name="n"))
        print("ended")
    """
    words = [sys.executable, "-c", dedent(program)]
    assert subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout == "ended\n"


def test_an_agent_that_is_closed_while_a_request_is_made_leaves_nothing_that_reaches_for_it() -> None:
    """In a process of its own: a handle that releases itself once its agent is destroyed is a crash."""
    program = """
        import gc, threading, torch
        from pdtx.errors import PeerLost
        from pdtx.transports.base import Region
        from pdtx.transports.nixl import agent as module
        from pdtx.transports.nixl.batches import Batch
        from pdtx.transports.nixl.library import load
        from pdtx.transports.nixl.messages import Place

        for _ in range(5):
            here, there = (module.Agent(load(), "UCX", 0, "tcp", name) for name in "ab")
            source, target = (Region(torch.zeros(1 << 20, dtype=torch.uint8)) for _ in range(2))
            here.register(source)
            there.register(target)
            here.meet(there.name, there.describe(target, itself=True))
            closing = threading.Thread(target=here.close)

            class Watched(module.Request):
                def __init__(self, *words):
                    super().__init__(*words)
                    closing.start()
                    closing.join(0.1)

            module.Request, real = Watched, module.Request
            try:
                here.post("WRITE", Place.of(source), (there.name, Place.of(target)), Batch.of(0, 0, 1 << 20), b"+")
            except PeerLost:
                pass
            closing.join()
            module.Request = real
            gc.collect()
            there.close()
        print("alive")
    """
    words = [sys.executable, "-X", "faulthandler", "-c", dedent(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr

"""Engines whose ranks and stages are processes of their own, driven by a test."""

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from types import TracebackType
from typing import Any, Self

from pdtx import errors
from tests.rank_process import PATIENCE_S, Decode, Prefill, Side, run
from tests.warm import WarmProcess


class Remote:
    """One process, and the pipe to it."""

    def __init__(self, role: type[Prefill] | type[Decode], side: Side) -> None:
        self.side = side
        self._pipe, other = multiprocessing.Pipe()
        self.process = WarmProcess(run, role, side, other)
        other.close()
        self._waiting = 1  # for its first word

    def begin(self, method: str, *arguments: Any) -> Self:  # noqa: ANN401
        """Order something; result() has to follow."""
        while self._waiting:
            self.result()
        self._pipe.send((method, arguments))
        self._waiting += 1
        return self

    def result(self, timeout_s: float = 2 * PATIENCE_S) -> Any:  # noqa: ANN401
        """What came of the order: its result, or its error."""
        assert self._pipe.poll(timeout_s), f"no answer from process {self.side.process}"
        kind, *rest = self._pipe.recv()
        self._waiting -= 1
        if kind == "value":
            return rest[0]
        name, text = rest
        cls: type[Exception] = getattr(errors, name, AssertionError)
        error = cls.__new__(cls)
        error.args = (text,)
        raise error

    def do(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401
        return self.begin(method, *arguments).result()

    def close_pipe(self) -> None:
        self._pipe.close()


def all_of(remotes: Sequence[Remote], method: str, *arguments: Any) -> list[Any]:  # noqa: ANN401
    """Order something of processes, all at once."""
    for remote in remotes:
        remote.begin(method, *arguments)
    return [remote.result() for remote in remotes]


def sides(count: int, template: Side, *, by_rank: bool = True, stages: Sequence[Sequence[str]] = ()) -> list[Side]:
    """The processes of an engine: one for each rank, or one for each stage of layers."""
    if stages:
        return [
            replace(template, process=at, processes=len(stages), layers=tuple(stage)) for at, stage in enumerate(stages)
        ]
    if not by_rank:
        return [replace(template, tp_size=count, ranks=tuple(range(count)))]
    return [replace(template, process=rank, processes=count, tp_size=count, ranks=(rank,)) for rank in range(count)]


class Fleet:
    """A prefill and a decode engine, connected: decode listens, and prefill dials; or the other way round to pull."""

    def __init__(self, prefill: Sequence[Side], decode: Sequence[Side], *, pull: bool = False) -> None:
        self.prefill = [Remote(Prefill, side) for side in prefill]
        self.decode = [Remote(Decode, side) for side in decode]
        self.others = list[Remote]()
        try:
            self.addresses = all_of(self.decode, "listen")
            if pull:
                self.sources = all_of(self.prefill, "listen")
                all_of(self.decode, "connect", *self.sources)
            else:
                all_of(self.prefill, "connect", *self.addresses)
        except BaseException:
            self._kill()
            raise

    def send(self, name: str, num_tokens: int, seed: int, *chunks: int) -> list[tuple[str, int, int, int]]:
        """Move a request, all processes at once; return what each of decode's found."""
        all_of(self.prefill, "begin", name, num_tokens, seed)
        for remote in self.prefill:
            remote.begin("compute", name, *chunks)
        found = all_of(self.decode, "take", seed)
        for remote in self.prefill:
            remote.result()
        for text, verified, _, _ in all_of(self.prefill, "wait", name):
            assert (text, verified) == ("done", True)
        return found

    def add_prefill(self, side: Side) -> Remote:
        """Start another prefill engine of one process, connected to the same decode engine."""
        self.others.append(Remote(Prefill, side))
        self.others[-1].do("connect", *self.addresses)
        return self.others[-1]

    def require_right(self, found: Sequence[tuple[str, int, int, int]], name: str) -> None:
        """Fail unless a request has arrived at all of decode's processes, every element of it right."""
        for request_id, compared, wrong, _ in found:
            assert (request_id, wrong) == (name, 0)
            assert compared > 0

    def require_all_free(self) -> None:
        assert all(all_of([*self.prefill, *self.decode], "all_free")), "blocks did not come back"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                alive = [
                    remote for remote in (*self.prefill, *self.others, *self.decode) if remote.process.poll() is None
                ]
                assert all(all_of(alive, "all_free")), "blocks did not come back"
                all_of(alive, "close")
                for remote in alive:
                    assert remote.process.wait(PATIENCE_S) == 0
        finally:
            self._kill()

    def _kill(self) -> None:
        for remote in (*self.prefill, *self.others, *self.decode):
            remote.process.kill()
            remote.process.wait(PATIENCE_S)
            remote.close_pipe()


def until(condition: Any, what: str, timeout_s: float = PATIENCE_S) -> None:  # noqa: ANN401
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


__all__ = ["Fleet", "Pipe", "Remote", "all_of", "sides", "until"]

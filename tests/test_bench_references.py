"""Yardsticks between two stations: they move what they say, to who knows the token, and end."""

import os
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pdtx.bench.reference_memcpy import Memcpy
from pdtx.bench.reference_memory import COLD_BYTES, Rotating
from pdtx.bench.reference_ucx import overall_rate
from pdtx.bench.references import ReferenceClient, ReferenceServer
from pdtx.errors import AuthenticationFailed, DeadlineExceeded, InputError, PdtxError, PeerLost, TransferError

NBYTES = 3 << 20


def test_a_socket_moves_rounds_of_bytes() -> None:
    with ReferenceServer.open("socket", "127.0.0.1", NBYTES) as server:
        assert server.token.hex() not in f"{server} {server.detail}"
        with ReferenceClient("socket", server.address, server.token, NBYTES) as client:
            assert all(client.round() > 0 for _ in range(3))
            assert "3,145,728 bytes" in client.detail == server.detail


def test_a_wrong_token_gets_nothing() -> None:
    with ReferenceServer.open("socket", "127.0.0.1", NBYTES) as server, pytest.raises(AuthenticationFailed):
        ReferenceClient("socket", server.address, bytes(32), NBYTES, timeout_s=5.0)


def test_a_server_that_ends_is_told() -> None:
    server = ReferenceServer.open("socket", "127.0.0.1", NBYTES)
    with ReferenceClient("socket", server.address, server.token, NBYTES) as client:
        client.round()
        server.close()
        server.close()
        with pytest.raises(PeerLost):
            client.round()
    assert not [thread for thread in threading.enumerate() if "reference" in thread.name]


def test_a_server_that_takes_fewer_bytes_would_show() -> None:
    """The answer comes only after all bytes: a client that expects less would wait for ever, and has a deadline."""
    with (
        ReferenceServer.open("socket", "127.0.0.1", 2 * NBYTES) as server,
        ReferenceClient("socket", server.address, server.token, NBYTES, timeout_s=2.0) as client,
    ):
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="the answer to a round"):
            client.round()
        assert time.monotonic() - begun < 20.0


def test_a_client_that_leaves_makes_room_for_the_next() -> None:
    with ReferenceServer.open("socket", "127.0.0.1", NBYTES) as server:
        for _ in range(2):
            with ReferenceClient("socket", server.address, server.token, NBYTES) as client:
                client.round()


def test_memcpy_copies_every_byte_of_runs_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    for native in (True, False):
        if not native:
            monkeypatch.setattr("pdtx.bench.reference_memcpy.library", lambda: None)
        copier = Memcpy(NBYTES, {4096: 3, 256: 7, 100: 1})
        sizes = copier._sizes
        assert sizes.sum() == NBYTES
        kinds, counts = np.unique(sizes, return_counts=True)
        found = dict(zip(kinds.tolist(), counts.tolist(), strict=True))
        assert found[256] / found[4096] == pytest.approx(7 / 3, rel=0.02)
        source = torch.arange(NBYTES, dtype=torch.int64).to(torch.uint8) * 7 + 3
        target = torch.zeros(NBYTES, dtype=torch.uint8)
        copier._copy(target, source)
        for offset, other, size in list(zip(copier._dst, copier._src, sizes, strict=True))[:50]:
            assert torch.equal(target[offset : offset + size], source[other : other + size])
        assert sorted(target.tolist()) == sorted(source.tolist())
        assert copier.round() > 0


@pytest.mark.parametrize("run_sizes", [None, {}, {1 << 30: 1}, {0: 5}, {7: 3}])
def test_memcpy_has_runs_for_any_case(run_sizes: dict[int, int] | None) -> None:
    with ReferenceClient("memcpy", "", b"", 100_001, run_sizes=run_sizes) as client:
        assert client.round() > 0
        assert "one thread" in client.detail


def test_memcpy_lays_out_no_more_runs_than_it_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.bench.reference_memcpy._MOST_RUNS", 1000)
    monkeypatch.setattr("pdtx.bench.reference_memory.COLD_BYTES", 1)
    copier = Memcpy(100_000, {2: 50, 4: 50})
    assert copier._from.piece_bytes == 3000
    assert len(copier._sizes) <= 1000
    assert copier.round() > 0


def _held(memory: Rotating) -> int:
    return memory._memory.untyped_storage().nbytes()


@pytest.mark.parametrize("run_sizes", [{1: 2**62}, {1: 2**40, 2**30: 2**30}, {2**62: 1}, {1 << 16: 5}])
def test_memcpy_takes_no_more_than_it_may_and_gives_it_back(run_sizes: dict[int, int]) -> None:
    most, alignment = 8 << 20, 2 << 20
    copier = Memcpy(1 << 30, run_sizes, most)
    memories = copier._from, copier._to
    tables = copier._sizes.nbytes + copier._src.nbytes + copier._dst.nbytes
    assert sum(map(_held, memories)) + tables <= most + 2 * alignment
    copier.close()
    assert sum(map(_held, memories)) + copier._sizes.nbytes + copier._src.nbytes + copier._dst.nbytes == 0


def test_a_socket_takes_no_more_than_it_may_and_gives_it_back() -> None:
    server = ReferenceServer.open("socket", "127.0.0.1", 1 << 30, max_bytes=4 << 20)
    client = ReferenceClient("socket", server.address, server.token, 1 << 30, max_bytes=1 << 20)
    buffers = [side._buffer for side in (server._server, client._client)]  # type: ignore[union-attr]
    assert [len(buffer._memory) for buffer in buffers] == [4 << 20, 1 << 20]
    client.close()
    server.close()
    assert sum(map(_held, buffers)) == 0


def test_rounds_take_turns_over_more_than_caches_hold() -> None:
    memory = Rotating(COLD_BYTES // 4)
    parts = [[piece.data_ptr() for piece in memory.pieces()] for _ in range(5)]
    assert [len(round_) for round_ in parts] == [1] * 5
    assert len({address for (address,) in parts}) == 4
    assert parts[4] == parts[0]


@pytest.mark.parametrize("name", ["memcpy", "socket"])
def test_large_rounds_take_no_more_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.bench.reference_memory.MOST_BYTES", 1 << 20)
    monkeypatch.setattr("pdtx.bench.reference_memory.COLD_BYTES", 1 << 20)
    memory = Rotating(NBYTES + 5)
    assert [len(piece) for piece in memory.pieces()] == [1 << 20, 1 << 20, 1 << 20, 5]
    assert len(memory._memory) == 1 << 20
    with (
        ReferenceServer.open(name, "127.0.0.1", NBYTES + 5) as server,
        ReferenceClient(name, server.address, server.token, NBYTES + 5, timeout_s=5.0) as client,
    ):
        assert all(client.round() > 0 for _ in range(3))


def test_memcpy_needs_no_server() -> None:
    with ReferenceServer.open("memcpy", "127.0.0.1", NBYTES) as server:
        assert (server.address, server.token) == ("", b"")


@pytest.mark.parametrize(
    ("name", "nbytes", "text"),
    [("iperf", 1, "no reference 'iperf'"), ("socket", 0, "not 0"), ("socket", 1 << 50, "moves 1 to")],
)
def test_what_cannot_be_is_refused_before_memory_is_taken(name: str, nbytes: int, text: str) -> None:
    with pytest.raises(InputError, match=text):
        ReferenceServer.open(name, "127.0.0.1", nbytes)
    with pytest.raises(InputError, match=text):
        ReferenceClient(name, "127.0.0.1:1", b"", nbytes)


def test_nobody_at_the_address_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PdtxError, match=f"127.0.0.1:{port}"):
        ReferenceClient("socket", f"127.0.0.1:{port}", bytes(32), NBYTES, timeout_s=2.0)


# -- ucx_perftest, by a program that plays it --------------------------------------------------------------------------

PRINTED = (
    "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n64,1,2,2,100,200.00,1,1\n"
)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that listens if it is given no host, for one connection, and prints figures if it is."""
    path = tmp_path / "ucx_perftest"
    path.write_text(
        "#!/usr/bin/env python3\n"
        "import socket, sys\n"
        "port = int(sys.argv[sys.argv.index('-p') + 1])\n"
        "if sys.argv[1] == '-p':\n"
        "    sock = socket.create_server(('127.0.0.1', port))\n"
        "    sock.accept()\n"
        "else:\n"
        "    socket.create_connection((sys.argv[1], port)).close()\n"
        f"    print({PRINTED!r}, end='')\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return path


@pytest.mark.usefixtures("program")
def test_ucx_perftest_serves_a_round_at_a_time() -> None:
    with ReferenceServer.open("ucx_perftest", "127.0.0.1", NBYTES) as server:
        with ReferenceClient("ucx_perftest", server.address, server.token, NBYTES, timeout_s=20.0) as client:
            assert [client.round() for _ in range(2)] == [pytest.approx(3 / 200)] * 2
        process = server._server._process  # type: ignore[attr-defined]
    assert process.wait(5) is not None
    assert not [thread for thread in threading.enumerate() if "ucx" in thread.name]


def test_ucx_perftest_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match="ucx_perftest is not on PATH"):
        ReferenceServer.open("ucx_perftest", "127.0.0.1", NBYTES)
    with pytest.raises(InputError, match="ucx_perftest is not on PATH"):
        ReferenceClient("ucx_perftest", "127.0.0.1:1", b"", NBYTES)


def test_a_round_that_hangs_ends_by_its_deadline(program: Path) -> None:
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with ReferenceClient("ucx_perftest", "127.0.0.1:1", b"", NBYTES, timeout_s=0.5) as client:
        with pytest.raises(DeadlineExceeded, match="a round of ucx_perftest"):
            client.round()
        process: subprocess.Popen[bytes] = client._client._process  # type: ignore[attr-defined]
    assert process.returncode is not None


def test_the_rate_is_read_from_its_column() -> None:
    assert overall_rate(PRINTED) == 200 * (1 << 20)


@pytest.mark.parametrize(
    "printed", ["", "no figures", "a,b\n1,2\n", PRINTED.replace("200.00", "0"), PRINTED.replace("200.00", "x")]
)
def test_output_without_a_rate_is_no_rate(printed: str) -> None:
    with pytest.raises(TransferError, match="printed no rate"):
        overall_rate(printed)

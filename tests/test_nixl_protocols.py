"""UCX's tables of protocols, as read: the right agent, operation and size, and whatever else it says is passed on."""

import logging
import os

import pytest

from pdtx.transports.nixl.protocols import GET, PUT, Choice, ProtocolLog, Tables


def table(agent: str, operation: str, *rows: str, thread: int = 0) -> str:
    head = ["+--------+-------+", f"| {agent} intra-node cfg#1 |", f"| {operation} |"]
    lines = [*head, "+---+---+", "| Range | Description | Config |", "+---+---+", *rows, "+---+---+"]
    return "".join(f"[1795988632.338019] [host:6674 :{thread}]   {line}\n" for line in lines)


WRITE = "remote memory write by ucp_put* from host memory to host"
READ = "remote memory read by ucp_get*(multi) into host memory from host"
SEND = "active message by ucp_am_send* from host memory"
RDMA = "| 2048..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_1:1/path0 |"


def test_tables_by_agent_operation_and_size() -> None:
    text = (
        table("a", WRITE, "| 0..2047 | short | tcp/lo |", RDMA)
        + table("b", WRITE, "| 0..inf | software emulation | tcp/eth0 |")
        + table("a", SEND, "| 0 | short | self/memory |", "| 1..inf | zero-copy | self/memory |")
        + table("a", READ, "| 0..inf | zero-copy | cma/memory |")
    )
    tables = Tables()
    assert tables.read(text.splitlines()) == []
    choices = tables.choices
    assert choices["b", PUT] == [Choice(float("inf"), "software emulation tcp/eth0")]
    assert [choice.most for choice in choices["a", PUT]] == [2047, float("inf")]
    assert choices["a", GET][0].text == "zero-copy cma/memory"


def test_the_last_table_of_a_kind_counts() -> None:
    text = table("a", WRITE, "| 0..inf | zero-copy | cma/memory |") + table("a", WRITE, "| 0..inf | short | tcp/lo |")
    tables = Tables()
    tables.read(text.splitlines())
    assert tables.choices == {("a", PUT): [Choice(float("inf"), "short tcp/lo")]}


def test_tables_that_two_threads_print_at_the_same_time() -> None:
    one = table("a", WRITE, "| 0..2047 | short | tcp/lo |", RDMA).splitlines()
    other = table("b", WRITE, "| 0..1023 | short | cma/memory |", "| 1024..inf | zero-copy | cma/memory |", thread=1)
    tables = Tables()
    tables.read(line for lines in zip(one, other.splitlines(), strict=True) for line in lines)
    assert [choice.most for choice in tables.choices["a", PUT]] == [2047, float("inf")]
    assert [choice.text for choice in tables.choices["b", PUT]] == ["short cma/memory", "zero-copy cma/memory"]


class TestLog:
    def write(self, log: ProtocolLog, text: str) -> None:
        """As UCX does: it opens the file by the name that it is given, and goes on writing."""
        if not hasattr(self, "_file"):
            self._file = os.open(log.settings()["UCX_LOG_FILE"], os.O_WRONLY)
        os.write(self._file, text.encode())

    def test_routes(self) -> None:
        log = ProtocolLog()
        self.write(log, table("a", WRITE, "| 0..2047 | short | tcp/lo |", RDMA))
        assert log.route("a", GET, 1) is None
        assert log.route("z", PUT, 1) is None
        short, large = (log.route("a", PUT, nbytes) for nbytes in (2047, 2048))
        assert short is not None
        assert large is not None
        assert (short.kind, large.kind) == ("tcp", "rdma")
        assert large.detail == "rc_mlx5/mlx5_0:1 + rc_mlx5/mlx5_1:1"

    def test_text_that_comes_in_pieces(self) -> None:
        log, text = ProtocolLog(), table("a", WRITE, "| 0..inf | software emulation | tcp/lo |")
        for piece in (text[:77], text[77:390], text[390:]):
            self.write(log, piece)
            found = log.route("a", PUT, 5)
        assert found is not None
        assert found.emulated

    def test_memory_is_given_back(self) -> None:
        log = ProtocolLog()
        for number in range(200):
            self.write(log, table(f"agent{number}", WRITE, *["| 0..inf | zero-copy | tcp/lo |"] * 50))
            assert log.route(f"agent{number}", PUT, 5) is not None
            log.forget(f"agent{number}")
            assert log.route(f"agent{number}", PUT, 5) is None
        assert os.fstat(self._file).st_blocks * 512 < 64 << 10
        assert os.fstat(self._file).st_size > 500_000

    def test_other_lines_are_passed_on(self, caplog: pytest.LogCaptureFixture) -> None:
        log = ProtocolLog()
        caplog.set_level(logging.DEBUG)
        self.write(log, "[1.2] [host:1 :0]  x.c:1 UCX  WARN  transport 'rc' is not available\n")
        self.write(log, "[1.2] [host:1 :0]  m.c:1 UCX  WARN  object 0x1 was not returned to mpool ucp_requests\n")
        assert log.route("a", PUT, 1) is None
        assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
        assert "transport 'rc' is not available" in caplog.records[0].message

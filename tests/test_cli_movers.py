"""Movers and their options as they are given on a command line."""

from pathlib import Path
from typing import Any, Literal

import pytest

from pdtx.cli.movers import mover_flags
from pdtx.errors import InputError
from pdtx.node.config import TransportConfig
from pdtx.node.transport import open_mover, parse_mode, parse_require, shares_memory
from pdtx.plan import Mode
from pdtx.transports.options import typed_options
from pdtx.transports.tcp import TcpMover


class Sample:
    """Not a mover: only its constructor counts."""

    def __init__(
        self,
        *,
        count: int = 1,
        seconds: float = 1.0,
        name: str = "",
        on: bool = False,
        room: int | None = None,
        word: Literal["auto", "fast"] = "auto",
        made: list[int] | None = None,
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("count=3", 3), ("count=-3", -3), ("seconds=3", 3.0), ("seconds=1e-3", 1e-3), ("name=3", "3"), ("name=", ""),
        ("name=a=b", "a=b"), ("on=true", True), ("on=No", False), ("room=7", 7), ("room=none", None),
        ("word=fast", "fast"), ("made=none", None),
    ],
)  # fmt: skip
def test_values_are_of_the_options_type(text: str, value: object) -> None:
    found = typed_options("sample", Sample, [text])
    assert found == {text.partition("=")[0]: value}
    assert type(next(iter(found.values()))) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("count", "'count' is not KEY=VALUE"),
        ("=3", "'=3' is not KEY=VALUE"),
        ("count=3.5", "option 'count' of mover sample must be a whole number, not '3.5'"),
        ("seconds=soon", "must be a number, not 'soon'"),
        ("on=perhaps", "must be true or false, not 'perhaps'"),
        ("room=lots", "must be a whole number or none, not 'lots'"),
        ("word=slow", "must be auto or fast, not 'slow'"),
        ("made=[1]", "not '\\[1\\]'"),
        ("colour=red", "mover sample has no option 'colour'; its options: count, seconds, name, on, room, word, made"),
    ],
)
def test_wrong_options_are_one_line(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        typed_options("sample", Sample, [text])


def test_an_option_comes_once() -> None:
    with pytest.raises(InputError, match="'stall_s' is given twice"):
        typed_options("tcp", TcpMover, ["stall_s=3", "stall-s=4"])


def test_a_mover_is_made_with_its_options() -> None:
    mover = open_mover(TransportConfig("tcp", ["stall-s=3"]), advertise="here.example")
    mover.close()
    assert isinstance(mover, TcpMover)
    with pytest.raises(InputError, match="unknown mover 'pigeon'"):
        open_mover(TransportConfig("pigeon"))
    with pytest.raises(InputError, match="advertise_host"):
        open_mover(TransportConfig("shm"), advertise="here.example")
    with pytest.raises(InputError, match="inproc works within one process"):
        open_mover(TransportConfig("inproc"))


def test_flags_are_passed_on() -> None:
    flags = mover_flags("tcp", ["a=1", "b=2"])
    assert flags == ["--mover", "tcp", "--mover-option", "a=1", "--mover-option", "b=2"]
    assert shares_memory("shm")
    assert not shares_memory("tcp")


def test_words() -> None:
    assert (parse_require("shm"), parse_require(None), parse_mode("staged")) == ("shm", None, Mode.STAGED)
    refused: list[tuple[Any, str]] = [(parse_require, "inproc"), (parse_mode, "fast")]
    for parse, text in refused:
        with pytest.raises(InputError, match=f"not.*{text}|{text}.* is not"):
            parse(text)


def test_rdma_is_required_in_vain_at_once_where_no_card_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.node.transport._RDMA_DEVICES", tmp_path)
    with pytest.raises(InputError, match=r"this host has no RDMA device .* possible here: tcp, and shm"):
        parse_require("rdma")
    assert parse_require("tcp") == "tcp"
    (tmp_path / "mlx5_0").mkdir()
    assert parse_require("rdma") == "rdma"

"""Logs: levels, lines for people, objects for programs."""

import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from pdtx.cli import logs
from pdtx.cli.common import configure_logging, note
from pdtx.errors import InputError
from tests.node_process import run


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    levels = {name: logging.getLogger(name).level for name in (*logs.OURS, "pdtx.note")}
    yield
    logs._json = False
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def test_json_lines_have_time_level_logger_message_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(False, "info", "json")
    logging.getLogger("decode_node.loop").info("request %s ended\n", "k1", extra={"request_id": "k1"})
    logging.getLogger("pdtx.engine").debug("not said")
    logging.getLogger("strange").info("not said")
    note('connected to "decode-1"')
    try:
        raise ValueError("no good")
    except ValueError:
        logging.getLogger("pdtx").exception("it failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["logger"], line["message"]) for line in lines] == [
        ("info", "decode_node.loop", "request k1 ended\n"),
        ("info", "pdtx.note", 'connected to "decode-1"'),
        ("error", "pdtx", "it failed"),
    ]
    assert [line.get("request_id") for line in lines] == ["k1", None, None]
    assert "ValueError: no good" in lines[2]["error"]
    assert all(datetime.fromisoformat(line["time"]).tzinfo is not None for line in lines)


@pytest.mark.parametrize(
    ("verbose", "level", "said"),
    [
        (False, None, ["warning", "error"]),
        (True, None, ["debug", "info", "warning", "error"]),
        (False, "info", ["info", "warning", "error"]),
        (True, "error", ["error"]),
    ],
)
def test_a_level_lets_through_itself_and_what_is_worse(verbose: bool, level: str | None, said: list[str]) -> None:
    configure_logging(verbose, level)
    logger = logging.getLogger("prefill_node.watching")
    names = ("debug", "info", "warning", "error")
    assert [name for name in names if logger.isEnabledFor(getattr(logging, name.upper()))] == said


@pytest.mark.parametrize(("level", "log_format"), [("loud", "text"), ("info", "xml")])
def test_what_there_is_not_is_refused(level: str, log_format: str) -> None:
    with pytest.raises(InputError, match=r"--log-(level|format) takes .+, not '(loud|xml)'"):
        configure_logging(False, level, log_format)


def test_notes_and_errors_of_a_node_are_objects_as_well() -> None:
    done = run("decode_node", "--log-format", "json", "--synthetic", "no-such-model", "--listen", "127.0.0.1:0")
    assert done.code == 2
    (line,) = (json.loads(text) for text in done.stderr.splitlines())
    assert (line["level"], line["logger"]) == ("error", "pdtx.note")
    assert line["message"].startswith("pdtx-decode: error: no config.json at no-such-model")

"""Logs on stderr: lines for people, or a JSON object a line for programs."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from pdtx.errors import InputError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
OURS = ("pdtx", "prefill_node", "decode_node")
"""The loggers that a level is for; what libraries have to say stays at warnings."""

_TEXT = "%(levelname)s %(name)s: %(message)s"
_notes = logging.getLogger("pdtx.note")
_json = False


class JsonFormatter(logging.Formatter):
    """One object a line: time (ISO, UTC), level, logger, message; request_id where known, error where one is raised."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            line["request_id"] = str(request_id)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(verbose: bool, level: str | None = None, log_format: str = "text") -> None:
    """Send pdtx's logs to stderr, from level on: warning where none is given, debug if verbose.

    Raises InputError for a level or format that there is not.
    """
    global _json  # a process has one stderr
    for flag, value, known in (("--log-level", level, LEVELS), ("--log-format", log_format, FORMATS)):
        if value is not None and value not in known:
            raise InputError(f"{flag} takes {', '.join(known)}, not {value!r}")
    _json = log_format == "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if _json else logging.Formatter(_TEXT))
    root = logging.getLogger()
    if not root.handlers or _json:  # who embeds the commands keeps what there is
        logging.basicConfig(handlers=[handler], level=logging.WARNING, force=_json)
    chosen = level or ("debug" if verbose else "warning")
    for name in OURS:
        logging.getLogger(name).setLevel(chosen.upper())
    _notes.setLevel(logging.INFO if _json else logging.NOTSET)


def say(text: str, level: int = logging.INFO) -> None:
    """Put a line on stderr: as it is, or as a log's object where logs are JSON."""
    if _json:
        _notes.log(level, text)
        return
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()

"""Result files: written whole or not at all, read strictly, old versions too."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pdtx.errors import InputError
from pdtx.results.impossible import refuse_impossible
from pdtx.results.model import RESULT_FORMAT, RESULT_VERSION, Result
from pdtx.results.old import from_version_1
from pdtx.results.summary import summarize
from pdtx.text import printable

MOST_BYTES = 1 << 30
"""More is no result: it would be a million iterations and more."""
_MOST_NAMES = 99
_OTHERS = {
    "pdtx-replay": "pdtx replay has written it and tells its figures itself; for the file see docs/replay.md",
}
"""Formats of this project that are no results."""


class _Head(msgspec.Struct):
    """What tells a result's version. requests: what version 1 has."""

    version: int
    format: str | None = None
    requests: list[Any] | None = None


def write_result_file(path: Path, result: Result, *, force: bool = False, numbered: bool = False) -> Path:
    """Write a result, and the figures that follow from it; return where.

    numbered: whether a path that exists makes the next free name be taken, unless force says that it is overwritten.
    Raises InputError for a path that exists, unless one of the two says so, or cannot be written.
    """
    cases = [
        case if case.skipped is not None else msgspec.structs.replace(case, figures=summarize(case).as_json())
        for case in result.cases
    ]
    written = msgspec.structs.replace(result, format=RESULT_FORMAT, version=RESULT_VERSION, cases=cases)
    content = msgspec.json.format(msgspec.json.encode(written), indent=2) + b"\n"
    for name in names_beside(path) if numbered else (path,):
        if write_whole(name, content, force=force):
            return name
    raise InputError(f"{path} exists; give another name, or --force to overwrite it")


def names_beside(path: Path) -> Iterator[Path]:
    """Yield a path, and then NAME-2 and so on with its suffix."""
    yield path
    for number in range(2, _MOST_NAMES + 1):
        yield path.with_stem(f"{path.stem}-{number}")


def write_whole(path: Path, content: bytes, *, force: bool = True) -> bool:
    """Write a file so that it is there whole or not at all; whether it was written.

    force: whether over what is there. Raises InputError where writing is impossible.
    """
    made = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            made = file.name
            file.write(content)
        os.chmod(made, 0o644)
        return _put(made, path, force=force)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    finally:
        if made is not None:
            Path(made).unlink(missing_ok=True)


def _put(made: str, path: Path, *, force: bool) -> bool:
    """Give what was made the name path; whether it has it: not where something is and force does not say so."""
    if not force:
        try:
            os.link(made, path)  # which never overwrites
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links: look, then write, is all that can be had
            if path.exists():
                return False
        else:
            return True
    os.replace(made, path)
    return True


def read_result_file(path: Path) -> Result:
    """Read a result of any version known; '-' is standard input.

    Raises InputError for a file that cannot be read, is no result, or was made by a newer pdtx.
    """
    return decode_result(_content(path), str(path))


def decode_result(content: bytes, name: str) -> Result:
    """Return the result that content is; name is for messages. Raises InputError if it is none."""
    try:
        head = msgspec.json.decode(content, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{name} is no result of pdtx: {printable(str(error))}") from None
    if head.format not in (None, RESULT_FORMAT):
        what = _OTHERS.get(head.format, f"its format is {head.format!r}")
        raise InputError(f"{name} is no result of pdtx bench: {what}")
    if head.version > RESULT_VERSION:
        raise InputError(
            f"{name} was made by a newer pdtx (version {head.version} of the format; this one reads up to "
            f"{RESULT_VERSION}); upgrade pdtx"
        )
    if head.format is not None and head.version < RESULT_VERSION:
        raise InputError(f"{name} is damaged, or was changed by hand: its format had no version {head.version}")
    if head.format is None and (head.version != 1 or head.requests is None):
        raise InputError(f"{name} is JSON, but no result of pdtx bench, pdtx demo or pdtx-prefill")
    return _decode(content, name, old=head.format is None)


def _decode(content: bytes, name: str, *, old: bool) -> Result:
    try:
        if old:
            result = from_version_1(msgspec.json.decode(content, type=dict[str, Any]))
        else:
            result = msgspec.json.decode(content, type=Result)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{name} is damaged, or was changed by hand: {printable(_placed(str(error)))}") from None
    refuse_impossible(result, name)
    for case in result.cases:
        case.figures = None  # they follow from the samples, which alone are believed
    return result


def _placed(text: str) -> str:
    """A decoder's message with the case and the iteration in words in front, where it has them."""
    found = re.search(r"\$\.cases\[(\d+)\](?:\.samples\[(\d+)\])?", text)
    if found is None:
        return text
    return f"case {found[1]}{f', iteration {found[2]}' if found[2] else ''}: {text}"


def _content(path: Path) -> bytes:
    try:
        if str(path) == "-":
            content = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise InputError(f"{path} has more than {MOST_BYTES} bytes; is this a result?")
    return content

"""Prompts from the command line or a file."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from pdtx.errors import InputError


class Prompt(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One prompt: text, or tokens as they are."""

    id: str | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None

    def tokens(self, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the prompt's tokens. Raises InputError if there are none."""
        ids = self.token_ids if self.token_ids is not None else encode(self.prompt or "")
        if not ids:
            raise InputError(f"prompt {self.id or self.prompt!r} has no tokens")
        return ids


def read_prompts(texts: list[str] | None, file: Path | None) -> list[Prompt]:
    """Return the prompts given as texts, or those of a file.

    A line of the file is a prompt as it is, or JSON: {"prompt": ...} or {"token_ids": [...]}. Every prompt gets an id.
    Raises InputError naming file and line.
    """
    if bool(texts) == (file is not None):
        raise InputError("give either --prompt TEXT (may be repeated) or --prompts FILE")
    prompts = [Prompt(prompt=text) for text in texts or []] if file is None else _read_file(file)
    for number, prompt in enumerate(prompts):
        prompt.id = prompt.id or f"p{number}"
    ids = [prompt.id for prompt in prompts]
    doubled = next((name for name in ids if ids.count(name) > 1), None)
    if doubled is not None:
        raise InputError(f"prompt id {doubled!r} is given twice")
    return prompts


def _read_file(file: Path) -> list[Prompt]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read prompts from {file}: {error}") from None
    prompts = [_read_line(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InputError(f"{file} has no prompts")
    return prompts


def _read_line(file: Path, number: int, line: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(prompt=line)
    try:
        return msgspec.json.decode(line, type=Prompt)
    except msgspec.MsgspecError as error:
        raise InputError(f"{file}:{number}: not a prompt: {error}") from None

"""Prompts: given one by one, or read from a file."""

import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from pdtx.errors import InputError
from pdtx.protocol import Id

if TYPE_CHECKING:
    import torch

_FEATURE_AXES = 2
_MAX_TOKEN = 2**31 - 1


class Prompt(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One prompt: text, or tokens as they are. features: a .npy file, for a model with an encoder.

    Raises InputError unless it has either.
    """

    id: Id | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    token_ids: Annotated[list[Annotated[int, Meta(ge=0, le=_MAX_TOKEN)]], Meta(min_length=1)] | None = None
    features: Annotated[str, Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.token_ids is None):
            raise InputError("give either prompt or token_ids")

    def tokens(self, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the prompt's tokens. Raises ModelError if its text has none."""
        return self.token_ids if self.token_ids is not None else encode(self.prompt or "")

    def load_features(self) -> "torch.Tensor | None":
        """Return what the encoder gets, float32 (mel, frames), or None if the prompt names no file.

        Raises InputError for a file that cannot be read or holds something else.
        """
        if self.features is None:
            return None
        import numpy as np
        import torch

        try:
            found = np.load(self.features, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise InputError(f"cannot read the features of prompt {self.id} from {self.features}: {reason}") from None
        if not isinstance(found, np.ndarray) or found.ndim != _FEATURE_AXES or found.dtype != np.float32:
            what = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else "an archive"
            raise InputError(f"{self.features} holds {what}; the features of a prompt are float32 (mel, frames)")
        return torch.from_numpy(found)


def read_prompts(texts: list[str] | None, file: Path | None) -> list[Prompt]:
    """Return the prompts given as texts, or those of a file.

    A line of the file is a prompt as it is, or JSON: {"prompt": ...} or {"token_ids": [...]}, perhaps with "features",
    a file whose name counts from the prompts' own folder. Every prompt gets an id.
    Raises InputError naming file and line.
    """
    if bool(texts) == (file is not None):
        raise InputError("give either --prompt TEXT (may be repeated) or --prompts FILE")
    if "" in (texts or []):
        raise InputError("--prompt is empty, so it has no tokens")
    return named([Prompt(prompt=text) for text in texts or []] if file is None else _read_file(file))


def named(prompts: Sequence[Prompt], first: int = 0) -> list[Prompt]:
    """Return prompts, each with an id: p0, p1, ... (from first on) where it has none.

    Raises InputError for an id that comes twice.
    """
    found = [
        prompt if prompt.id else msgspec.structs.replace(prompt, id=f"p{at}")
        for at, prompt in enumerate(prompts, first)
    ]
    check_ids(prompt.id for prompt in found)
    return found


def check_ids(ids: Iterable[str | None]) -> None:
    """Raise InputError for an id that comes twice."""
    seen = set[str | None]()
    for name in ids:
        if name in seen:
            raise InputError(f"prompt id {name!r} is given twice")
        seen.add(name)


def check_id(name: object) -> None:
    """Raise InputError for what no request can be called."""
    try:
        msgspec.convert(name, Id)
    except msgspec.ValidationError:
        raise InputError(f"prompt id {name!r} cannot be used; give 1 to 128 letters, digits or . _ : + -") from None


def token_list(token_ids: Any, whose: str) -> list[int]:  # noqa: ANN401 - numpy's and torch's arrays are sequences, too
    """Return token ids as a list of int. token_ids: a sequence, or an array, of whole numbers of any kind.

    whose: for messages. Raises InputError naming the first that is none.
    """
    try:
        found = list(token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids)
    except TypeError:
        raise InputError(f"{whose}: token_ids takes a sequence of whole numbers, not {token_ids!r}") from None
    if not found:
        raise InputError(f"{whose}: token_ids is empty; give one token at least")
    return [_token(one, at, whose) for at, one in enumerate(found)]


def _token(value: object, at: int, whose: str) -> int:
    try:
        token = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        token = -1
    if not 0 <= token <= _MAX_TOKEN:
        raise InputError(f"{whose}: token_ids[{at}] is {value!r}; give whole numbers from 0 to {_MAX_TOKEN}")
    return token


def _read_file(file: Path) -> list[Prompt]:
    try:
        # Lines end where an editor says so: not at the other separators that splitlines() knows, which may be text.
        lines = [line.removesuffix("\r") for line in file.read_text(encoding="utf-8-sig").split("\n")]
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
        prompt = msgspec.json.decode(line, type=Prompt)
    except (msgspec.MsgspecError, InputError) as error:
        raise InputError(f"{file}:{number}: not a prompt: {error}") from None
    if prompt.features is not None:
        prompt.features = str(file.parent / prompt.features)
    return prompt

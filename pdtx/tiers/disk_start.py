"""What a disk tier does before its first block: it takes in the files that are there, and makes its staging memory."""

import errno
import logging
import os
from collections.abc import Sequence
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path

import numpy as np

from pdtx.cache import KVCaches
from pdtx.errors import LayoutError
from pdtx.tiers.direct_io import open_to_read, write_own
from pdtx.tiers.extents import byte_order
from pdtx.tiers.files import BlockFolder, Found
from pdtx.tiers.geometry import block_nbytes, tier_caches
from pdtx.tiers.shelf import Shelf

logger = logging.getLogger(__name__)

_LAYOUTS, _MOST_NAMES = "layouts", 1 << 16


def staging_for(like: KVCaches, block_tokens: int, layouts: tuple[str, ...] | None, count: int) -> KVCaches:
    """Allocate so many blocks of each group in a tier's layouts, or a few more. Raises what tier_caches() does."""
    sizes = (
        nbytes * (block_tokens // group.block_size if group.counts_tokens else 1)
        for group, nbytes in zip(like.groups, block_nbytes(like), strict=True)
    )
    one = max(1, sum(sizes))
    # Besides those the null block, two of groups that are not kept, and what a layout pads pages with.
    nbytes = (count + 3) * one * 9 // 8
    return tier_caches(like, block_tokens=block_tokens, nbytes=nbytes, layouts=layouts, tokens_per_state=block_tokens)


def own_folder(
    directory: Path,
    *,
    like: KVCaches,
    block_tokens: int,
    fingerprint: bytes,
    layouts: tuple[str, ...] | None,
    threads: int,
) -> tuple[Path, tuple[KVCaches, ...]]:
    """Return the folder of a cache's files in a tier's directory, made where it is absent, and two staging memories
    with a block for each of so many threads.

    What lies in files depends on block size, ranks and layouts, so that each of those has a folder. layouts: where
    None, those of the files that are there, or else what tier_caches() takes. Raises OSError, and what that does.
    """
    begin = f"{fingerprint.hex()[:32]}-{block_tokens}-{like.tp_size}-"
    chosen, staging = layouts, None
    if layouts is None:
        for names in _remembered(directory, begin):
            staging = staging or _as_remembered(like, block_tokens, names, threads)
            chosen = chosen or (names if staging else None)
    first = staging or staging_for(like, block_tokens, chosen, threads)
    named = [f"{buffer.name} {byte_order(buffer)}" for buffer in first.buffers]
    folder = directory / f"{begin}{blake2b(repr(named).encode(), digest_size=8).hexdigest()}"
    folder.mkdir(exist_ok=True)
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(folder))
    write_own(folder / _LAYOUTS, "\n".join(buffer.layout.name for buffer in first.buffers))
    return folder, (first, staging_for(like, block_tokens, chosen, threads))


def _as_remembered(like: KVCaches, block_tokens: int, names: tuple[str, ...], threads: int) -> KVCaches | None:
    """Return staging memory if it has just these layouts, buffer by buffer."""
    try:
        staging = staging_for(like, block_tokens, names, threads)
    except LayoutError:
        return None
    return staging if tuple(buffer.layout.name for buffer in staging.buffers) == names else None


def _remembered(directory: Path, begin: str) -> list[tuple[str, ...]]:
    """Return the layouts of such folders, the latest first."""
    found = list[tuple[float, tuple[str, ...]]]()
    for path in directory.glob(f"{begin}*/{_LAYOUTS}"):
        try:
            with os.fdopen(open_to_read(path, direct=False)) as file:
                found.append((path.stat().st_mtime, tuple(file.read(_MOST_NAMES).split())))
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read: %s", path, error)
    return [names for _, names in sorted(found, reverse=True) if names]


def take_in(files: BlockFolder, shelves: Sequence[Shelf], layouts: Sequence[tuple[str, ...]]) -> None:
    """Put what a folder holds on the shelves, the oldest first; delete what is half, bad or too much.

    layouts: of each group's buffers. Every header is read, some 0.2 ms a file. Raises OSError.
    """
    if half := files.clean():
        logger.warning("%s: deleted %d files of stores that had not ended", files.root, half)
    found: dict[str, list[Found]] = {shelf.name: [] for shelf in shelves}
    ours = {shelf.name: (own, shelf.block_nbytes) for shelf, own in zip(shelves, layouts, strict=True)}
    for file in files.scan():
        if isinstance(file, tuple):
            _delete(*file)
        elif ours.get(file.header.group) != (file.header.layouts, file.header.nbytes):
            _delete(file.path, "it holds a block of another cache")
        else:
            found[file.header.group].append(file)
    for shelf in shelves:
        _fill(shelf, sorted(found[shelf.name], key=attrgetter("written_ns")))


def _delete(path: Path, reason: str) -> None:
    logger.warning("deleting %s: %s", path, reason)
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        logger.warning("%s is a directory of somebody's, and stays", path)


def _fill(shelf: Shelf, files: Sequence[Found]) -> None:
    """Take in the latest of a group's files, as many as there is room for; delete the others."""
    first = max(0, len(files) - shelf.num_blocks)
    for file in files[:first]:
        file.path.unlink(missing_ok=True)
    headers = [file.header for file in files[first:]]
    blocks = np.arange(1, len(headers) + 1, dtype=np.int64)
    digests, proofs, contents = (
        [getattr(header, name) for header in headers] for name in ("digest", "proof", "content")
    )
    shelf.adopt(digests, proofs, blocks, contents)

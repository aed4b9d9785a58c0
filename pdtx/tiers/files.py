"""A block on disk: one file of a header sector and the payload, visible under its name when it is whole, or not at all.

    8 bytes   magic              2  version        2  length of the body      4  zero
    8 bytes   xxh3_64 of the body                     the body, msgpack       zeros up to 4,096
    then the payload, in the order of Extents, and zeros up to a multiple of 4,096

A file is written under a temporary name and renamed; where a block was evicted, its file is written over, which costs
a file system less than a deletion and a new file. Nothing is synced unless that is
asked for: it is a cache, and after a power cut the checksum tells torn blocks from whole ones.
"""

import contextlib
import itertools
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
import numpy as np
import xxhash

from pdtx.errors import TierError
from pdtx.ranges import Iovecs, range_of
from pdtx.ranges.iovec import address_of
from pdtx.tiers.checksum import CHECKSUM_BYTES, checksum
from pdtx.tiers.direct_io import SECTOR, aligned, create, open_to_read, open_to_write, read_all, write_all
from pdtx.units import round_up

MAGIC, VERSION = b"pdtx-blk", 2
_READ_VERSIONS = (1, VERSION)
"""1 had no content hash."""

_PREFIX = struct.Struct("<8sHHxxxxQ")
_MOST_BODY = SECTOR - _PREFIX.size
MOST_PROOF_BYTES = 1024
MOST_CONTENT_BYTES = 1024
"""Of 64 buffers."""

SUFFIX, TEMPORARY = ".kv", ".part"

_Bytes32 = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a file says that it holds. nbytes: of the payload. content: its content hash, empty where it has none."""

    digest: _Bytes32
    proof: Annotated[bytes, msgspec.Meta(max_length=MOST_PROOF_BYTES)]
    group: _Name
    layouts: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=64)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
    checksum: Annotated[bytes, msgspec.Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
    content: Annotated[bytes, msgspec.Meta(max_length=MOST_CONTENT_BYTES)] = b""

    def to_bytes(self) -> bytes:
        """Return the header without the zeros behind it. Raises TierError where it does not fit a sector."""
        body = msgspec.msgpack.encode(self)
        if len(body) > _MOST_BODY:
            raise TierError(
                f"a header of {len(body)} bytes does not fit a sector; give group and layouts shorter names"
            )
        return _PREFIX.pack(MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body

    @classmethod
    def from_bytes(cls, sector: bytes) -> "Header":
        """Read a header. Raises TierError for anything that to_bytes() did not make."""
        if len(sector) < _PREFIX.size:
            raise TierError(f"short read: a header of {len(sector)} bytes")
        magic, version, length, check = _PREFIX.unpack_from(sector)
        if magic != MAGIC:
            raise TierError("no block of a tier: the first 8 bytes are others")
        if version not in _READ_VERSIONS:
            raise TierError(f"a block of version {version}, not {VERSION}")
        body = sector[_PREFIX.size : _PREFIX.size + length]
        if len(body) < length or xxhash.xxh3_64_intdigest(body) != check:
            raise TierError("the header's checksum does not match")
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except msgspec.MsgspecError as error:
            raise TierError(f"the header cannot be read: {error}") from None


def short_proof(proof: bytes) -> bytes:
    """Return what stands for a proof in headers: itself, or a digest of one that is too long."""
    return proof if len(proof) <= MOST_PROOF_BYTES else blake2b(proof, digest_size=32).digest()


def file_bytes(nbytes: int) -> int:
    """Return what a block of nbytes takes on disk."""
    return SECTOR + round_up(nbytes, SECTOR)


class Frame:
    """Memory that makes up a file: the header's sector, the payload, and zeros up to a whole sector.

    payload: its ranges, uint64, shape (n, 2). For one thread at a time, and for reading or writing alone.
    """

    def __init__(self, payload: Iovecs) -> None:
        self.payload, self.nbytes = payload, int(payload[:, 1].sum())
        self._sectors = aligned(2 * SECTOR)
        at, pad = address_of(self._sectors), round_up(self.nbytes, SECTOR) - self.nbytes
        behind = [range_of(at + SECTOR, pad)] if pad else []
        self._vectors = np.concatenate([range_of(at, SECTOR), payload, *behind])
        self.file_bytes = SECTOR + self.nbytes + pad

    @property
    def header(self) -> bytes:
        """The header's sector."""
        return self._sectors[:SECTOR].tobytes()

    @header.setter
    def header(self, said: bytes) -> None:
        self._sectors[:SECTOR] = 0
        self._sectors[: len(said)] = np.frombuffer(said, np.uint8)

    def vectors(self) -> Iovecs:
        """Return all of it in the file's order, for a cursor to change."""
        return self._vectors.copy()


@dataclass(frozen=True)
class Found:
    """A file that a scan came across: what its header says, and when it was written (ns)."""

    header: Header
    path: Path
    written_ns: int


class BlockFolder:
    """The files of one tier's blocks, spread over 16 x 16 folders. Safe to use from several threads.

    direct: past the page cache, for ranges that are aligned for it. fsync: sync each file before it gets its name.
    """

    def __init__(self, root: Path, *, direct: bool, fsync: bool = False) -> None:
        """root: an existing folder, of one tier alone."""
        self.root, self.direct, self._fsync = root, direct, fsync
        self._root = str(root)  # of a path for each block, making Paths would cost more than opening it
        self._numbers, self._spare = itertools.count(), dict[int, deque[Path]]()

    def path(self, group: str, digest: bytes) -> Path:
        """Return where a block is, or would be."""
        return Path(self._name(group, digest))

    def _name(self, group: str, digest: bytes) -> str:
        name = digest.hex()
        return f"{self._root}/{name[0]}/{name[1]}/{name}.{quote(group, safe='')}{SUFFIX}"

    def write(self, header: Header, frame: Frame, *, direct: bool, check: Callable[[], None] = lambda: None) -> None:
        """Make a block's file. direct: the payload is aligned. check: called when all is written, before it is named.

        Raises OSError, TierError, or what check() raises, and leaves nothing then.
        """
        path = self.path(header.group, header.digest)
        frame.header = header.to_bytes()
        temporary, fd = self._open_temporary(path, header.nbytes, direct=direct and self.direct)
        try:
            try:
                write_all(fd, frame.vectors(), frame.file_bytes)
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            check()
            self._rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        if self._fsync:
            _sync_folder(path.parent)

    def _open_temporary(self, path: Path, nbytes: int, *, direct: bool) -> tuple[Path, int]:
        """Open an evicted block's file of just this size, or a new one."""
        with contextlib.suppress(KeyError, IndexError, OSError):
            spare = self._spare[nbytes].popleft()
            return spare, open_to_write(spare, direct=direct)
        temporary = self._temporary(path.parent)
        try:
            return temporary, create(temporary, direct=direct)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            return temporary, create(temporary, direct=direct)

    def _temporary(self, folder: Path) -> Path:
        return folder / f".{next(self._numbers)}{TEMPORARY}"

    def _rename(self, temporary: Path, path: Path) -> None:
        try:
            temporary.rename(path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.rename(path)

    def read(self, wanted: Header, frame: Frame, *, direct: bool) -> None:
        """Fill a frame with a block's payload, which is then known to be what was written.

        wanted: what the header must say, but for the checksum and the content hash. Raises OSError for a file that
        cannot be read, and TierError for one that is cut, of another block or changed; the frame may have been written
        to all the same.
        """
        fd = open_to_read(self._name(wanted.group, wanted.digest), direct=direct and self.direct)
        try:
            read_all(fd, frame.vectors(), frame.file_bytes)
        finally:
            os.close(fd)
        header = Header.from_bytes(frame.header)
        said = msgspec.structs.replace(header, checksum=wanted.checksum, content=wanted.content)
        if said != wanted:
            fields = [name for name in Header.__struct_fields__ if getattr(said, name) != getattr(wanted, name)]
            raise TierError(f"the file is of another block: its {', '.join(fields)} differ")
        if checksum(frame.payload) != header.checksum:
            raise TierError("the checksum does not match: bytes have changed on disk")

    def remove(self, group: str, digest: bytes) -> None:
        """Delete a block's file, if it is there. Raises OSError."""
        self.path(group, digest).unlink(missing_ok=True)

    def evict(self, group: str, digest: bytes, nbytes: int) -> None:
        """Take a block's name from its file, which the next block of that size is written over. Raises OSError."""
        temporary = self._temporary(self.root / digest.hex()[0] / digest.hex()[1])
        self.path(group, digest).rename(temporary)
        self._spare.setdefault(nbytes, deque()).append(temporary)

    def drop_spares(self) -> None:
        """Delete the files of evicted blocks that no block was written over. Raises OSError."""
        for spares in list(self._spare.values()):
            with contextlib.suppress(IndexError):
                while True:
                    spares.popleft().unlink(missing_ok=True)

    def clean(self) -> int:
        """Delete what killed stores have left under temporary names; return how many. Raises OSError."""
        left = [entry for entry in self._entries() if entry.name.endswith(TEMPORARY)]
        for entry in left:
            os.unlink(entry.path)
        return len(left)

    def scan(self) -> Iterator[Found | tuple[Path, str]]:
        """Read the headers of all files; of one that is none of ours, or cut, the path and what is wrong with it."""
        for entry in self._entries():
            if entry.name.endswith(TEMPORARY):
                continue
            path = Path(entry.path)
            try:
                with os.fdopen(open_to_read(path, direct=False), "rb", buffering=0) as file:
                    header, status = Header.from_bytes(file.read(SECTOR)), os.fstat(file.fileno())
                if status.st_size != file_bytes(header.nbytes):
                    raise TierError(f"it has {status.st_size} bytes, not {file_bytes(header.nbytes)}")
                if path != self.path(header.group, header.digest):
                    raise TierError("its name is another block's")
            except (OSError, TierError) as error:
                yield path, str(error)
            else:
                yield Found(header, path, status.st_mtime_ns)

    def _entries(self) -> "Iterator[os.DirEntry[str]]":
        with os.scandir(self.root) as firsts:
            for first in [entry for entry in firsts if entry.is_dir(follow_symlinks=False)]:
                with os.scandir(first) as seconds:
                    for second in [entry for entry in seconds if entry.is_dir(follow_symlinks=False)]:
                        with os.scandir(second) as files:
                            yield from list(files)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Files of blocks: the format, what is refused, and that nothing half is ever visible."""

import errno
import os
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtx.errors import TierError
from pdtx.ranges import Iovecs, pwritev
from pdtx.ranges.iovec import address_of
from pdtx.tiers import direct_io
from pdtx.tiers.checksum import checksum
from pdtx.tiers.direct_io import SECTOR, aligned, takes_direct_io
from pdtx.tiers.files import BlockFolder, Found, Frame, Header, file_bytes

Bytes = npt.NDArray[np.uint8]


def ranges_of(memory: Bytes, *cuts: tuple[int, int]) -> Iovecs:
    return np.array([(address_of(memory) + first, nbytes) for first, nbytes in cuts], np.uint64)


def header_of(ranges: Iovecs, digest: bytes = b"\x12" * 32, group: str = "full") -> Header:
    return Header(digest, b"tokens", group, ("flash_attn_nhd",), int(ranges[:, 1].sum()), checksum(ranges))


@pytest.fixture
def payload() -> tuple[Bytes, Iovecs]:
    memory = np.random.default_rng(0).integers(0, 256, 3 * SECTOR, dtype=np.uint8)
    return memory, ranges_of(memory, (SECTOR, 5000), (10, 300), (2 * SECTOR + 1000, 1))


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    return BlockFolder(tmp_path, direct=takes_direct_io(tmp_path))


def files_in(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_a_block_comes_back_into_other_ranges(folder: BlockFolder, payload: tuple[Bytes, Iovecs]) -> None:
    memory, ranges = payload
    header = header_of(ranges)
    folder.write(header, Frame(ranges), direct=False)
    assert [path.stat().st_size for path in files_in(folder.root)] == [file_bytes(5301)] == [3 * SECTOR]
    there = np.zeros(8000, np.uint8)
    folder.read(header, Frame(ranges_of(there, (2000, 5301))), direct=False)
    assert bytes(there[2000:7301]) == bytes(memory[4096:9096]) + bytes(memory[10:310]) + bytes(memory[9192:9193])
    assert not there[:2000].any()
    assert not there[7301:].any()


def test_nothing_of_a_longer_header_is_left_behind_a_shorter_one(
    folder: BlockFolder, payload: tuple[Bytes, Iovecs]
) -> None:
    frame, header = Frame(payload[1]), header_of(payload[1])
    for proof in (b"x" * 1000, b"short"):
        folder.write(msgspec.structs.replace(header, proof=proof), frame, direct=False)
    sector = folder.path("full", header.digest).read_bytes()[:SECTOR]
    assert b"xx" not in sector


def test_aligned_blocks_go_past_the_page_cache(folder: BlockFolder) -> None:
    if not folder.direct:
        pytest.skip("no O_DIRECT in the temporary folder's file system")
    memory, there = aligned(4 * SECTOR), aligned(4 * SECTOR)
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), dtype=np.uint8)
    cuts = ((SECTOR, SECTOR), (0, SECTOR))
    header = header_of(ranges_of(memory, *cuts))
    folder.write(header, Frame(ranges_of(memory, *cuts)), direct=True)
    folder.read(header, Frame(ranges_of(there, *cuts)), direct=True)
    assert bytes(there[: 2 * SECTOR]) == bytes(memory[: 2 * SECTOR])


@pytest.mark.parametrize("direct", [False, True])
def test_a_short_file_is_a_short_read(folder: BlockFolder, direct: bool) -> None:
    memory = aligned(4 * SECTOR)
    memory[:] = 7
    ranges = ranges_of(memory, (0, 4 * SECTOR))
    header = header_of(ranges)
    folder.write(header, Frame(ranges), direct=direct)
    for nbytes in (4 * SECTOR, 2 * SECTOR + 100, 100, 0):
        os.truncate(folder.path("full", header.digest), nbytes)
        with pytest.raises(TierError, match="short read"):
            folder.read(header, Frame(ranges), direct=direct)


def test_every_flipped_byte_is_found(folder: BlockFolder, payload: tuple[Bytes, Iovecs]) -> None:
    header = header_of(payload[1])
    folder.write(header, Frame(payload[1]), direct=False)
    path = folder.path("full", header.digest)
    whole, used = path.read_bytes(), 24 + len(msgspec.msgpack.encode(header))
    for at in [*range(12), *range(16, used), SECTOR, SECTOR + 4999, SECTOR + 5000, SECTOR + 5300]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(TierError):
            folder.read(header, Frame(payload[1]), direct=False)
    path.write_bytes(whole)
    folder.read(header, Frame(payload[1]), direct=False)


def test_a_file_of_another_block_is_refused(folder: BlockFolder, payload: tuple[Bytes, Iovecs]) -> None:
    header = header_of(payload[1])
    folder.write(header, Frame(payload[1]), direct=False)
    for field, value in (("proof", b"others"), ("layouts", ("sglang",)), ("nbytes", 5300)):
        with pytest.raises(TierError, match=f"another block: its {field} differ"):
            folder.read(msgspec.structs.replace(header, **{field: value}), Frame(payload[1]), direct=False)
    other = msgspec.structs.replace(header, digest=b"\x13" * 32)
    folder.path("full", other.digest).parent.mkdir(parents=True, exist_ok=True)
    folder.path("full", header.digest).rename(folder.path("full", other.digest))
    with pytest.raises(TierError, match="its digest differ"):
        folder.read(other, Frame(payload[1]), direct=False)
    assert [found[1] for found in folder.scan() if isinstance(found, tuple)] == ["its name is another block's"]


def test_a_scan_tells_blocks_from_what_is_none(folder: BlockFolder, payload: tuple[Bytes, Iovecs]) -> None:
    headers = [header_of(payload[1], bytes([n]) * 32, group) for n in range(3) for group in ("full", "a/b ..")]
    for header in headers:
        folder.write(header, Frame(payload[1]), direct=False)
    here = folder.path("full", b"\x00" * 32).parent
    (here / ".half.kv.0.part").write_bytes(b"half")
    (here / "junk.kv").write_bytes(b"junk")
    (here / "long.kv").write_bytes(b"x" * 9000)
    os.truncate(folder.path("full", b"\x01" * 32), SECTOR)
    assert folder.clean() == 1
    scanned = list(folder.scan())
    good = {(found.header.digest, found.header.group) for found in scanned if isinstance(found, Found)}
    assert good == {(header.digest, header.group) for header in headers} - {(b"\x01" * 32, "full")}
    wrong = {found[0].name[:8] for found in scanned if isinstance(found, tuple)}
    assert wrong == {"junk.kv", "long.kv", "01010101"}
    folder.remove("full", b"\x00" * 32)
    folder.remove("full", b"\x00" * 32)
    assert not folder.path("full", b"\x00" * 32).exists()


@pytest.mark.parametrize("fault", ["full at once", "full later", "nothing written", "no rename"])
def test_a_store_that_fails_leaves_nothing(
    folder: BlockFolder, payload: tuple[Bytes, Iovecs], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    calls = 0

    def failing(fd: int, iovecs: int, count: int, offset: int) -> int:
        nonlocal calls
        calls += 1
        if fault == "nothing written":
            return 0
        if fault == "full later" and calls == 1:
            return os.pwrite(fd, b"x" * 100, offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def rename(path: Path, _: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    if fault == "no rename":
        monkeypatch.setattr(Path, "rename", rename)
    else:
        monkeypatch.setattr(direct_io, "pwritev", failing)
    with pytest.raises((OSError, TierError), match=r"No space|short write|quota"):
        folder.write(header_of(payload[1]), Frame(payload[1]), direct=False)
    assert files_in(folder.root) == []
    monkeypatch.undo()
    folder.write(header_of(payload[1]), Frame(payload[1]), direct=False)
    assert len(files_in(folder.root)) == 1


def test_short_writes_are_carried_on(
    folder: BlockFolder, payload: tuple[Bytes, Iovecs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "pwritev", lambda fd, iovecs, count, offset: pwritev(fd, iovecs, 1, offset))
    header = header_of(payload[1])
    folder.write(header, Frame(payload[1]), direct=False)
    folder.read(header, Frame(payload[1]), direct=False)


@given(st.binary(max_size=200))
def test_no_bytes_make_a_header_by_chance(data: bytes) -> None:
    with pytest.raises(TierError):
        Header.from_bytes(data)


@given(st.integers(0, 120), st.binary(min_size=1, max_size=20))
def test_a_changed_header_is_refused(at: int, bytes_: bytes) -> None:
    whole = Header(b"d" * 32, b"p" * 40, "full", ("a", "b"), 12345, b"c" * 16).to_bytes()
    changed = whole[:at] + bytes_ + whole[at + len(bytes_) :]
    if changed[:12] + changed[16 : len(whole)] != whole[:12] + whole[16:]:
        with pytest.raises(TierError):
            Header.from_bytes(changed)


def test_a_header_that_is_too_large_is_refused() -> None:
    with pytest.raises(TierError, match="does not fit a sector"):
        Header(b"d", b"", "full", tuple("x" * 200 for _ in range(40)), 0, b"c" * 16).to_bytes()


@pytest.mark.parametrize("count", [1, 3, 5000])
def test_the_checksum_is_of_the_bytes_in_order(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.random.default_rng(count).integers(0, 256, 3_000_000, dtype=np.uint8)
    begins = np.random.default_rng(1).integers(0, 2_000_000, count)
    cuts = [(int(begin), 1 + int(begin) % 900) for begin in begins]
    joined = np.concatenate([memory[first : first + nbytes] for first, nbytes in cuts])
    whole = checksum(ranges_of(joined, (0, len(joined))))
    assert checksum(ranges_of(memory, *cuts)) == whole
    monkeypatch.setenv("PDTX_NATIVE", "0")
    assert checksum(ranges_of(memory, *cuts)) == whole
    assert count == 1 or checksum(ranges_of(memory, *cuts[::-1])) != whole

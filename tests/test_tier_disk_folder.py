"""What lies in a disk tier's folder that the tier has not put there, or has put there for another cache."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pdtx.cache import KVCaches, PagedLatentCache
from pdtx.errors import TierError
from pdtx.kvspec import MLAAttentionSpec
from pdtx.tiers import Side
from tests.engine_pair import join
from tests.tier_disks import TOKENS, WAIT_S, every, keys_of, load, open_disk, plain, store, tables_of
from tests.tier_scenes import FENCE, KEPT

LIMIT_S = 20


def in_pages(block_size: int) -> KVCaches:
    """Vectors with their scales: the values of a page's tokens lie before their scales, so a page is a unit."""
    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=132, dtype="uint8")
    blocks = 3 * TOKENS // block_size
    return join([PagedLatentCache(spec, layout="deepseek_indexer", num_layers=2, num_blocks=blocks, name="indexer")])


def test_files_of_other_pages_are_not_found(tmp_path: Path) -> None:
    small, large = in_pages(16), in_pages(32)
    with_codes = small.buffers[0].memory
    with_codes[:] = torch.randint(256, with_codes.shape, dtype=torch.uint8)
    disk = open_disk(tmp_path, small)
    moved = disk.store(keys_of(2), Side(small, tables_of(small, 2), hold=KEPT), every(small, 2), FENCE).result(WAIT_S)
    assert moved.num_blocks == 2
    disk.close()
    for cache, there in ((large, False), (small, True)):
        disk = open_disk(tmp_path, cache)
        with disk.lookup(keys_of(2), every(cache, 2)) as lease:
            assert lease.found[0].tolist() == [there, there]
        disk.close()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A tier's folder with blocks in it; beside it a file of somebody's."""
    cache, folder = plain(), tmp_path / "tier"
    disk = open_disk(folder, cache)
    store(disk, cache, 3)
    disk.close()
    (tmp_path / "theirs").write_text("precious")
    return folder


def own(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.mark.timeout(LIMIT_S)
def test_a_link_in_place_of_the_lock_is_not_followed(kept: Path) -> None:
    lock = kept / "pdtx.lock"
    lock.unlink()
    lock.symlink_to(kept.parent / "theirs")
    with pytest.raises(TierError, match="cannot keep blocks in"):
        open_disk(kept, plain())
    assert (kept.parent / "theirs").read_text() == "precious"


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_list_of_layouts_is_written_anew(kept: Path, kind: str) -> None:
    path = own(kept) / "layouts"
    path.unlink()
    if kind == "link":
        path.symlink_to(kept.parent / "theirs")
    else:
        os.mkfifo(path)
    disk = open_disk(kept, plain())
    assert load(disk, plain(), 3)[1]
    disk.close()
    assert (kept.parent / "theirs").read_text() == "precious"


@pytest.mark.timeout(LIMIT_S)
def test_a_link_in_place_of_the_tiers_own_folder_is_refused(kept: Path) -> None:
    inner, elsewhere = own(kept), kept.parent / "elsewhere"
    inner.rename(elsewhere)
    inner.symlink_to(elsewhere)
    with pytest.raises(TierError, match="cannot keep blocks in"):
        open_disk(kept, plain())


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_in_place_of_a_block_is_a_miss(kept: Path, kind: str) -> None:
    """Also while the tier is running: nobody waits for the other end of a pipe."""
    for running in (False, True):
        cache = plain()
        disk = open_disk(kept, cache) if running else None
        victim = min(own(kept).rglob("*.kv"))
        victim.unlink()
        if kind == "link":
            victim.symlink_to(kept.parent / "theirs")
        elif kind == "pipe":
            os.mkfifo(victim)
        else:
            victim.mkdir()
        disk = disk or open_disk(kept, cache)
        moved, whole = load(disk, cache, 3)
        assert not whole
        assert moved.num_blocks == 2
        assert np.count_nonzero(moved.places[0] < 3) == 2
        if kind == "folder":
            victim.rmdir()
        store(disk, cache, 3)
        assert load(disk, plain(), 3)[1]
        disk.close()
    assert (kept.parent / "theirs").read_text() == "precious"

"""The disk tier's ways, and plain files of the same sizes."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from pdtx.bench.raw import Files, RawRead, RawWrite, drop_from_page_cache
from pdtx.bench.scene import TierScene
from pdtx.bench.settings import RateSettings
from pdtx.bench.turns import Way
from pdtx.bench.ways import TierLoad, TierStore, fill, nothing
from pdtx.errors import InputError
from pdtx.tiers.direct_io import takes_direct_io
from pdtx.tiers.disk import THREADS, DiskTier
from pdtx.tiers.files import file_bytes


@contextmanager
def disk_ways(scene: TierScene, settings: RateSettings) -> Iterator[dict[str, Way]]:
    """Make the disk tier's ways, as cpu_ways does for the other one; its files are gone afterwards."""
    with ExitStack() as stack:
        try:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="pdtx-bench-", dir=settings.directory))
            )
        except OSError as error:
            raise InputError(f"no directory for the disk tier: {error.strerror}: {error.filename}") from None
        direct = takes_direct_io(folder) if settings.page_cache == "auto" else settings.page_cache == "direct"
        dropped = settings.page_cache == "dropped" or (settings.page_cache == "auto" and not direct)
        tier_folder, raw_folder = folder / "tier", folder / "raw"
        for one in (tier_folder, raw_folder):
            one.mkdir()
        sizes = [file_bytes(nbytes) for nbytes in scene.tier_block_nbytes for _ in range(scene.tier_blocks)]
        tier = DiskTier(
            tier_folder,
            like=scene.source,
            block_tokens=scene.tier_block_tokens,
            # Of each group one more than a prompt has.
            nbytes=sum(sizes) // scene.tier_blocks * (scene.tier_blocks + 1),
            fingerprint=scene.fingerprint,
            layouts=settings.tier_layouts,
            direct=direct,
        )
        stack.enter_context(closing(tier))
        fill(tier, scene)
        files = stack.enter_context(closing(Files(raw_folder, sizes, direct=direct, threads=THREADS)))
        state = "O_DIRECT" if direct else "page cache dropped before" if dropped else "page cache holds it"
        before, raw_before = (
            (partial(drop_from_page_cache, one) if dropped else nothing) for one in (tier_folder, raw_folder)
        )
        written = "O_DIRECT" if direct else "into the page cache"
        plain = f"{files.count} files, {THREADS} threads"
        yield {
            "store": TierStore("disk tier store", written, scene, tier),
            "store against": RawWrite(scene, files, plain),
            "load": TierLoad("disk tier load", state, scene, tier, before),
            "load against": RawRead(scene, files, plain, raw_before),
        }

"""What guests are made of beside the host's files: a kernel with its modules, and verbs. Kept in a folder of their own.

Debian's packages are downloaded and unpacked there, never installed: libraries of ibverbs-providers would be loaded
into processes of the host too, beside NIXL's. Only what guests use is kept (a few MB of 400).
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rdma_lab import apt
from rdma_lab.say import LabError, say

EARLY = ("virtio_pci", "virtio_net", "virtio_rng", "9pnet_virtio", "9p", "overlay")
"""Modules that the guest needs to see the host's files."""

_LATE = ("crc32_generic", "rdma_rxe", "rdma_ucm", "ib_uverbs", "sch_netem", "dummy", "veth")
_KERNEL = "linux-image-amd64"
_VERBS = ("ibverbs-providers", "ibverbs-utils", "libibverbs1", "libnl-3-200", "libnl-route-3-200")
_VERBS_KEPT = (
    "librxe-rdmav*.so",
    "libibverbs.so.1*",
    "libnl-3.so.200*",
    "libnl-route-3.so.200*",
    "ibv_devinfo",
    "ibv_devices",
)
"""Soft-RoCE's provider, what that needs where the host does not have it, and ibv_devinfo."""


@dataclass(frozen=True)
class Kernel:
    """root: holds boot/vmlinuz-VERSION and lib/modules/VERSION."""

    root: Path
    version: str

    @property
    def image(self) -> Path:
        """The kernel itself."""
        return self.root / "boot" / f"vmlinuz-{self.version}"

    @property
    def modules(self) -> Path:
        """The folder of its modules, with modules.dep."""
        return self.root / "lib" / "modules" / self.version


@dataclass(frozen=True)
class Parts:
    """verbs: a folder with Soft-RoCE's provider and programs."""

    kernel: Kernel
    verbs: Path


def open_parts() -> Parts:
    """Return the parts for guests, out of the cache: PDTX_CACHE or ~/.cache/pdtx, rdma-lab in it. Fetches them once.

    PDTX_RDMA_LAB_PARTS names a folder with kernel/boot/vmlinuz-*, kernel/lib/modules/* and verbs/ to be used instead.
    Raises LabError if there are none to be had.
    """
    if given := os.environ.get("PDTX_RDMA_LAB_PARTS"):
        folder = Path(given).expanduser().resolve()
    else:
        folder = Path(os.environ.get("PDTX_CACHE") or "~/.cache/pdtx").expanduser().resolve() / "rdma-lab"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once: one fetches, the other finds it done
            for name, fetch in (("kernel", _fetch_kernel), ("verbs", _fetch_verbs)):
                if not (folder / name).exists():
                    _require_apt()
                    with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as work:
                        fetch(Path(work)).rename(folder / name)
    return Parts(_kernel_in(folder / "kernel"), folder / "verbs")


def _require_apt() -> None:
    for program in ("apt-get", "apt-cache", "dpkg-deb", "busybox"):
        if shutil.which(program) is None:
            raise LabError(
                f"there is no {program} here to fetch a kernel with; set PDTX_RDMA_LAB_PARTS to unpacked ones"
            )


def _kernel_in(root: Path) -> Kernel:
    found = sorted(root.glob("boot/vmlinuz-*"))
    if not found:
        raise LabError(f"there is no boot/vmlinuz-* in {root}; remove that folder, or set PDTX_RDMA_LAB_PARTS")
    kernel = Kernel(root, found[-1].name.removeprefix("vmlinuz-"))
    if not (kernel.modules / "modules.dep").exists():
        raise LabError(f"there is no modules.dep in {kernel.modules}; run: busybox depmod -b {root} {kernel.version}")
    return kernel


def _fetch_kernel(work: Path) -> Path:
    """Return a folder with the kernel and those of its modules that guests load."""
    names = [name for name in apt.depends(_KERNEL) if name.startswith("linux-image-")]
    if not names:
        raise LabError(f"apt knows no {_KERNEL}; run apt-get update, or set PDTX_RDMA_LAB_PARTS to unpacked ones")
    say(f"fetching {names[0]} (70 MB, once)")
    full, slim = apt.unpack(names[:1], work), work / "slim"
    version = next(full.glob("boot/vmlinuz-*")).name.removeprefix("vmlinuz-")
    _depmod(full, version)
    _take(Kernel(full, version), Kernel(slim, version))
    _depmod(slim, version)
    return slim


def _depmod(root: Path, version: str) -> None:
    apt.run(["busybox", "depmod", "-b", str(root), version], 120)


def _take(full: Kernel, slim: Kernel) -> None:
    slim.image.parent.mkdir(parents=True)
    shutil.copy2(full.image, slim.image)
    for module in in_order(full, (*EARLY, *_LATE)):
        target = slim.modules / module.relative_to(full.modules)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(module, target)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        if (full.modules / name).exists():
            shutil.copy2(full.modules / name, slim.modules / name)


def _fetch_verbs(work: Path) -> Path:
    """Return a folder with Soft-RoCE's provider and what goes with it, all in one place."""
    say("fetching Soft-RoCE's verbs provider (1 MB, once)")
    full, slim = apt.unpack(list(_VERBS), work), work / "slim"
    slim.mkdir()
    for pattern in _VERBS_KEPT:
        for path in full.rglob(pattern):
            if path.parent.name != "bash-completion" and (path.is_symlink() or path.is_file()):
                shutil.copy2(path, slim / path.name, follow_symlinks=False)
    return slim


def in_order(kernel: Kernel, names: Iterable[str]) -> list[Path]:
    """Return the files of modules and all that they need, each after those; what is built in has no file."""
    needs = dict[str, tuple[str, list[str]]]()
    for line in (kernel.modules / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[_name_of(path)] = path, rest.split()
    # An ordered set: what a module needs comes before it.
    files = dict[str, None]()

    def add(name: str) -> None:
        if name in needs and needs[name][0] not in files:
            path, others = needs[name]
            for other in others:
                add(_name_of(other))
            files[path] = None

    for name in names:
        add(_name_of(name))
    return [kernel.modules / path for path in files]


def _name_of(path: str) -> str:
    return Path(path).name.split(".ko")[0].replace("-", "_")

"""The small first root of a guest: busybox, a few modules in the order of loading, and a script."""

import gzip
import shutil
import stat
from pathlib import Path

from rdma_lab.parts import EARLY, Kernel, in_order
from rdma_lab.say import LabError

_ALIGN = 4


def write_initrd(target: Path, kernel: Kernel, script: Path) -> None:
    """Write a compressed cpio archive. Raises LabError if there is no busybox."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise LabError("there is no busybox; install busybox-static")
    archive = _Archive()
    for folder in ("bin", "modules", "dev", "proc", "sys", "host", "new", "up"):
        archive.folder(folder)
    archive.file("bin/busybox", Path(busybox).read_bytes())
    archive.file("init", script.read_bytes())
    for number, module in enumerate(in_order(kernel, EARLY)):
        archive.file(f"modules/{number:02d}-{module.name}", module.read_bytes())
    target.write_bytes(gzip.compress(archive.ended(), compresslevel=1))


class _Archive:
    """A cpio archive of the kind "newc", as the kernel reads it."""

    def __init__(self) -> None:
        self._parts = list[bytes]()
        self._count = 0

    def folder(self, name: str) -> None:
        self._add(name, stat.S_IFDIR | 0o755, b"")

    def file(self, name: str, contents: bytes) -> None:
        self._add(name, stat.S_IFREG | 0o755, contents)

    def ended(self) -> bytes:
        self._add("TRAILER!!!", 0, b"")
        return b"".join(self._parts)

    def _add(self, name: str, mode: int, contents: bytes) -> None:
        self._count += 1
        path = name.encode() + b"\0"
        # inode, mode, uid, gid, links, time, size, device, device of the node, length of the name, checksum
        fields = (self._count, mode, 0, 0, 1, 0, len(contents), 0, 0, 0, 0, len(path), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields)
        self._parts += [_padded(head + path), _padded(contents)]


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % _ALIGN)

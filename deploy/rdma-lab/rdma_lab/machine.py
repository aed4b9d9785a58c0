"""One virtual machine: a QEMU process that dies with the lab."""

import ctypes
import os
import signal
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rdma_lab.parts import Kernel
from rdma_lab.say import LabError

_PR_SET_PDEATHSIG = 1
_QEMU = "qemu-system-x86_64"
WIRE_MTU = 9000
"""Bytes; RoCE takes the largest power of two below, 4096."""


@dataclass(frozen=True)
class Setup:
    """What machines are made of. run: the folder of sockets and consoles; share: what guests see as /share."""

    kernel: Kernel
    initrd: Path
    run: Path
    share: Path
    memory_mib: int

    @property
    def wire(self) -> Path:
        """The socket that joins two machines."""
        return self.run / "wire"


class Machine:
    """A guest that boots when this is made."""

    def __init__(self, setup: Setup, node: int, nodes: int) -> None:
        """Raise LabError if QEMU does not start."""
        self.node, self.console = node, setup.run / f"console.{node}"
        self._status = setup.share / ".lab" / f"rc.{node}"
        self._complaints = setup.run / f"qemu.{node}"
        try:
            with open(self._complaints, "wb") as complaints:
                self._process = subprocess.Popen(
                    _command(setup, node, nodes, self.console),
                    stdin=subprocess.DEVNULL,
                    stdout=complaints,
                    stderr=subprocess.STDOUT,
                    preexec_fn=partial(_die_with, os.getpid()),
                )
        except OSError as error:
            raise LabError(f"{_QEMU} does not start: {error}") from None

    @property
    def running(self) -> bool:
        """Whether QEMU is."""
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The command's exit status, or None if it has not ended."""
        try:
            return int(self._status.read_text())
        except (OSError, ValueError):
            return None

    def last_words(self) -> str:
        """What QEMU or the guest's console said last."""
        for path in (self._complaints, self.console):
            lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
            if lines:
                return lines[-1].strip()
        return "nothing on its console"

    def stop(self) -> None:
        """End it, whatever it does; returns when it is gone."""
        if self.running:
            self._process.kill()
        self._process.wait()


def _die_with(parent: int) -> None:
    """In the child before exec: Ctrl-C is for the lab alone, and a lab that is killed takes its machines along."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # killed before that was asked for
        os._exit(1)


def _command(setup: Setup, node: int, nodes: int, console: Path) -> list[str]:
    words = (
        f"console=ttyS0 panic=-1 quiet loglevel=4 mitigations=off nokaslr tsc=reliable net.ifnames=0 lab.node={node}"
    )
    command = [
        _QEMU,
        # Plain emulation, also where /dev/kvm can be opened: on nested machines it hangs. "max" has what wheels want.
        *("-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-smp", "1", "-M", "q35", "-m", str(setup.memory_mib)),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", f"file:{console}"),
        *("-kernel", str(setup.kernel.image), "-initrd", str(setup.initrd), "-append", words),
        *("-device", "virtio-rng-pci"),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        *("-virtfs", f"local,path={setup.share},mount_tag=share,security_model=none"),
    ]
    if nodes == 2:
        server = "on" if node == 1 else "off"
        command += ["-netdev", f"stream,id=wire,server={server},addr.type=unix,addr.path={setup.wire}"]
        command += ["-device", f"virtio-net-pci,netdev=wire,mac=52:54:00:77:00:0{node},host_mtu={WIRE_MTU}"]
    return command

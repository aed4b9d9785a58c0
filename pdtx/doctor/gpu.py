"""GPUs: the driver's own files, nvidia-smi, and the way from a card's memory into a network card."""

from collections.abc import Iterator

from pdtx.doctor.finding import Finding, Level, Want
from pdtx.doctor.machine import PROGRAM_S, Machine

_SUBJECT = "GPU"
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,pci.bus_id", "--format=csv,noheader")


def check_gpu(machine: Machine) -> Iterator[Finding]:
    """Look for GPUs and their driver."""
    cards = machine.names("/proc/driver/nvidia/gpus")
    version = machine.text("/proc/driver/nvidia/version")
    if version is None:
        present = [one for one in machine.names("/sys/bus/pci/devices") if _is_gpu(machine, one)]
        value = f"no driver, though {len(present)} NVIDIA cards are in the machine" if present else "none"
        fix = "install NVIDIA's driver; in a container, start it with --gpus all (or the device plugin of Kubernetes)"
        level: Level = "warning" if present else "ok"
        yield Finding(subject=_SUBJECT, name="driver", value=value, level=level, fix=fix, stops=("cuda",))
        return
    yield Finding(subject=_SUBJECT, name="driver", value=version.splitlines()[0] if version else "loaded")
    told = machine.run(_QUERY, PROGRAM_S)
    if told is None:
        fix = (
            "run nvidia-smi and see what it says; driver and libraries may be of two versions (restart after an update)"
        )
        value = f"{len(cards)} cards by the driver, but nvidia-smi does not answer"
        yield Finding(subject=_SUBJECT, name="cards", value=value, level="warning", fix=fix, stops=("cuda",))
        return
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    fix = "" if lines else "give the process a card: --gpus all, or CUDA_VISIBLE_DEVICES"
    stops: tuple[Want, ...] = () if lines else ("cuda",)
    yield Finding(subject=_SUBJECT, name="cards", value="; ".join(lines) or "none", fix=fix, stops=stops)
    if machine.names("/sys/class/infiniband"):
        yield _peer_memory(machine)


def _is_gpu(machine: Machine, device: str) -> bool:
    """Whether a PCI device is a display or 3D controller of NVIDIA's."""
    folder = f"/sys/bus/pci/devices/{device}"
    return machine.text(f"{folder}/vendor") == "0x10de" and (machine.text(f"{folder}/class") or "").startswith("0x03")


def _peer_memory(machine: Machine) -> Finding:
    """Whether a network card may read a GPU's memory: by this module, or by dmabufs of the open driver."""
    if "nvidia_peermem" in machine.names("/sys/module"):
        return Finding(subject=_SUBJECT, name="GPUDirect RDMA", value="nvidia_peermem is loaded")
    return Finding(
        subject=_SUBJECT,
        name="GPUDirect RDMA",
        value="nvidia_peermem is not loaded",
        level="warning",
        fix="modprobe nvidia_peermem, unless the driver is the open one and hands out dmabufs (kernel 5.12 or newer)",
    )

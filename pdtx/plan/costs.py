"""What movers cost on this machine: measured by the bench command, kept in a file, with defaults where nobody measured.

The file is JSON: {"version": 1, "costs": [{"mover": "tcp", "device": "cpu", "run_s": ..., "wire_bytes_per_s": ...,
"pack_run_s": ..., "pack_bytes_per_s": ..., "measured": "when and where, for people"}, ...]}.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdtx.errors import InputError
from pdtx.plan.modes import Costs

COSTS_VARIABLE = "PDTX_COSTS"
"""Environment variable with the path of the file, instead of costs_path()'s default."""

_MOST_BYTES = 1 << 20
_Seconds = Annotated[float, Meta(ge=0.0, le=1.0)]
_Rate = Annotated[float, Meta(ge=1.0, le=1e15)]

DEFAULTS: Mapping[tuple[str, str], Costs] = MappingProxyType({
    # One system call takes 1,024 ranges, and the kernel copies range by range.
    ("tcp", "cpu"): Costs(run_s=1.0e-7, wire_bytes_per_s=3.0e9, pack_run_s=3.0e-8, pack_bytes_per_s=9.0e9),
    # One copy in a C loop: packing first would be a second copy.
    ("shm", "cpu"): Costs(run_s=3.0e-8, wire_bytes_per_s=9.0e9, pack_run_s=3.0e-8, pack_bytes_per_s=9.0e9),
    ("inproc", "cpu"): Costs(run_s=3.0e-8, wire_bytes_per_s=9.0e9, pack_run_s=3.0e-8, pack_bytes_per_s=9.0e9),
    # One request a run, posted through ctypes.
    ("ucx", "cpu"): Costs(run_s=1.0e-6, wire_bytes_per_s=3.0e9, pack_run_s=3.0e-8, pack_bytes_per_s=9.0e9),
    ("nixl", "cpu"): Costs(run_s=1.0e-6, wire_bytes_per_s=3.0e9, pack_run_s=3.0e-8, pack_bytes_per_s=9.0e9),
})  # fmt: skip
"""What to reckon with before anything is measured: round figures of one core and loopback, see docs/plans.md."""

_ON_A_DEVICE = Costs(run_s=1.0e-6, wire_bytes_per_s=3.0e9, pack_run_s=1.0e-9, pack_bytes_per_s=5.0e11)
"""Of any mover from a device's memory: its own kernels pack there."""


class MeasuredCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What moving from one kind of memory by one mover costs; see Costs. device: torch's type, as in cpu, cuda."""

    mover: Annotated[str, Meta(min_length=1, max_length=64)]
    device: Annotated[str, Meta(min_length=1, max_length=64)]
    run_s: _Seconds
    wire_bytes_per_s: _Rate
    pack_run_s: _Seconds
    pack_bytes_per_s: _Rate
    measured: Annotated[str, Meta(max_length=1000)] = ""

    @property
    def costs(self) -> Costs:
        """The figures."""
        return Costs(
            run_s=self.run_s,
            wire_bytes_per_s=self.wire_bytes_per_s,
            pack_run_s=self.pack_run_s,
            pack_bytes_per_s=self.pack_bytes_per_s,
        )


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Literal[1] = 1
    costs: Annotated[list[MeasuredCosts], Meta(max_length=1000)]


@dataclass(frozen=True)
class CostTable:
    """Measured costs, and where they come from; source is empty where nothing was measured."""

    measured: Mapping[tuple[str, str], Costs]
    source: str = ""

    def of(self, mover: str, device: str) -> tuple[Costs, str]:
        """Return the costs of a mover from a kind of device's memory, and where they come from, for people."""
        found = self.measured.get((mover, device))
        if found is not None:
            return found, f"the costs in {self.source}"
        usual = DEFAULTS.get((mover, device), Costs() if device == "cpu" else _ON_A_DEVICE)
        return usual, f"default costs of {mover}"


def costs_path() -> Path:
    """Return where the costs of this machine are kept: PDTX_COSTS, or costs.json in the user's cache folder."""
    given = os.environ.get(COSTS_VARIABLE)
    return Path(given) if given else Path("~/.cache/pdtx/costs.json").expanduser()


def load_costs(path: Path | None = None) -> CostTable:
    """Read measured costs: of path, else of costs_path(), where a missing file means that nothing was measured.

    Raises InputError, naming the file and the field, for one that was asked for and is not there, or that is broken.
    """
    asked = path is not None or COSTS_VARIABLE in os.environ
    path = path or costs_path()
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} is no file of costs: it has more than {_MOST_BYTES} bytes")
        data = path.read_bytes()
    except FileNotFoundError:
        if asked:
            raise InputError(f"no costs at {path}; measure them there, or unset {COSTS_VARIABLE}") from None
        return CostTable({})
    except OSError as error:
        raise InputError(f"cannot read costs from {path}: {error.strerror}") from None
    try:
        found = msgspec.json.decode(data, type=_File).costs
    except msgspec.MsgspecError as error:
        raise InputError(f"{path} is no file of costs: {error}; measure them again, or remove it") from None
    return CostTable({(one.mover, one.device): one.costs for one in found}, str(path))


def save_costs(costs: Sequence[MeasuredCosts], path: Path | None = None) -> Path:
    """Write costs, keeping those of other movers and devices that are there already; return the file.

    Raises InputError for figures that load_costs would refuse, a broken file, or one that cannot be written.
    """
    path = path or costs_path()
    kept = dict[tuple[str, str], MeasuredCosts]()
    try:
        if path.exists():
            kept = {(one.mover, one.device): one for one in msgspec.json.decode(path.read_bytes(), type=_File).costs}
        kept |= {(one.mover, one.device): one for one in costs}
        text = msgspec.json.encode(_File(costs=list(kept.values())))
        msgspec.json.decode(text, type=_File)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.format(text, indent=2) + b"\n")
        os.replace(file.name, path)
    except msgspec.MsgspecError as error:
        raise InputError(f"costs for {path} that cannot be: {error}") from None
    except OSError as error:
        raise InputError(f"cannot write costs to {path}: {error.strerror}") from None
    return path

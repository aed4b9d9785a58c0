"""Movers and CUDA, each tried in a process of its own."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from pdtx.doctor.finding import Finding, Want
from pdtx.doctor.machine import Machine
from pdtx.doctor.probe import CUDA, MARK, Trial

TRIAL_S = 60.0
_KILLING_S = 5.0
_SILENT = "could not be tried: python did not import pdtx in time; longer: --trial-timeout"
_MOVERS: Mapping[str, tuple[Want, ...]] = {"tcp": ("tcp",), "shm": ("shm",), "ucx": ("ucx",), "nixl": ("nixl",)}
_INSTALL = {"ucx": "pip install 'pdtx[ucx]'", "nixl": "pip install 'pdtx[nixl]'"}


def try_all(machine: Machine, names: Sequence[str] = (*_MOVERS, CUDA), *, trial_s: float = TRIAL_S) -> dict[str, Trial]:
    """Try movers and CUDA. One that says nothing for trial_s seconds, or ends badly, is told as an error."""
    limit = f"@{time.monotonic() + trial_s}"
    told = machine.run((sys.executable, "-m", "pdtx.doctor", limit, *names), trial_s + _KILLING_S)
    lines = [line.removeprefix(MARK) for line in (told or "").splitlines() if line.startswith(MARK)]
    trials = {trial.name: trial for trial in (msgspec.json.decode(line, type=Trial) for line in lines)}
    return {name: trials.get(name, Trial(name=name, error=_SILENT)) for name in names}


def check_movers(trials: Mapping[str, Trial]) -> Iterator[Finding]:
    """Judge what was tried."""
    for name, stops in _MOVERS.items():
        if name in trials:
            yield _mover(trials[name], stops)
            yield from _two_copies(trials[name])
    if CUDA in trials:
        yield _cuda(trials[CUDA])
    able = [trial for trial in trials.values() if "rdma" in trial.kinds]
    value = ", ".join(f"{trial.name} by {_rdma_lanes(trial)}" for trial in able) or "by no mover"
    fix = "" if able else "see RDMA, UCX and memlock above; a run asks for it with --require rdma, and fails without"
    yield Finding(subject="movers", name="rdma", value=value, fix=fix, stops=() if able else ("rdma",))


def _mover(trial: Trial, stops: tuple[Want, ...]) -> Finding:
    if trial.error:
        fix = _INSTALL.get(trial.name, "") if "install" in trial.error else "see what it says"
        return Finding(subject="movers", name=trial.name, value=trial.error, fix=fix, stops=stops)
    words = [trial.detail or "works", f"may use {', '.join(trial.lanes)}" if trial.lanes else ""]
    return Finding(subject="movers", name=trial.name, value="; ".join(word for word in words if word))


def _two_copies(trial: Trial) -> Iterator[Finding]:
    """Warn of libraries of one name from two folders: the second is mixed with the first."""
    stems = dict[str, list[str]]()
    for path in trial.mapped:
        stems.setdefault(Path(path).name.partition(".so")[0], []).append(path)
    twice = [paths for paths in stems.values() if len({Path(path).parent for path in paths}) > 1]
    for paths in twice:
        fix = (
            "keep one: unset LD_LIBRARY_PATH or LD_PRELOAD, or uninstall libucx; or choose with --mover-option library="
        )
        value = "the process has two of them loaded: " + ", ".join(paths)
        yield Finding(subject="movers", name=f"{trial.name}, UCX", value=value, level="warning", fix=fix)
    if trial.mapped and not twice:
        yield Finding(subject="movers", name=f"{trial.name}, UCX", value="loaded: " + ", ".join(trial.mapped))


def _cuda(trial: Trial) -> Finding:
    if not trial.error:
        return Finding(subject="movers", name=CUDA, value=trial.detail)
    fix = "install torch for CUDA in the driver's version, and give the process a card"
    return Finding(subject="movers", name=CUDA, value=trial.error, fix=fix, stops=("cuda",))


def _rdma_lanes(trial: Trial) -> str:
    from pdtx.transports.ucx.lanes import Lane

    lanes = [lane for lane in trial.lanes if Lane(*lane.split("/", 1)).kind == "rdma"]
    return ", ".join(lanes)

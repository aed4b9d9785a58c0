"""Which of many processes that were started alike this one is: as torchrun, Slurm or LeaderWorkerSet tell it."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from pdtx.bench.work import Role
from pdtx.errors import InputError

DEFAULT_PORT = 29500
"""Where the store is, if nobody says; torch's own default."""

_SLURM_PORTS = range(20000, 40000)
_SCONTROL_S = 10.0


@dataclass(frozen=True)
class Place:
    """A process of a run. The first `prefill` ranks are prefill agents, the others decode agents.

    rank: of world. index: among those of its role. master, port: where the store is. launcher: who has said so.
    hosts_store: whether this process makes the store; under torchrun the launcher itself may have made it.
    attempt: how often the launcher has restarted the run, which tells its keys in the store apart.
    """

    rank: int
    world: int
    role: Role
    index: int
    master: str
    port: int
    launcher: str
    hosts_store: bool
    attempt: str = "0"

    @property
    def drives(self) -> bool:
        """Whether this process measures, beside being an agent."""
        return self.rank == 0

    @classmethod
    def from_environment(cls, env: Mapping[str, str], prefill: int, decode: int) -> Self:
        """Return this process's place among so many prefill and decode agents.

        Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them; else SLURM_PROCID, SLURM_NTASKS and
        SLURM_JOB_NODELIST of a job step; else LWS_WORKER_INDEX, LWS_GROUP_SIZE and LWS_LEADER_ADDRESS. MASTER_ADDR
        and MASTER_PORT hold for all of them.
        Raises InputError where none of these is set, one is missing or no number, or the counts do not add up.
        """
        launcher, rank, world = _rank_and_world(env)
        if prefill < 1 or decode < 1:
            raise InputError(f"there must be a prefill and a decode agent, not {prefill} and {decode}")
        if world != prefill + decode:
            raise InputError(
                f"{launcher} has started {world} processes, and {prefill} prefill and {decode} decode agents are "
                f"{prefill + decode}; start as many, or change --prefill-agents and --decode-agents"
            )
        if not 0 <= rank < world:
            raise InputError(f"{launcher} says that this is rank {rank} of {world}")
        first = launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=rank,
            world=world,
            role="prefill" if rank < prefill else "decode",
            index=rank if rank < prefill else rank - prefill,
            master=_master(env, launcher),
            port=_port(env, launcher),
            launcher=launcher,
            hosts_store=rank == 0 and not first,
            attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )


def _rank_and_world(env: Mapping[str, str]) -> tuple[str, int, int]:
    """Return who has started this process, its rank and how many there are."""
    for launcher, rank, world in (
        ("torchrun", "RANK", "WORLD_SIZE"),
        ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
        ("LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE"),
    ):
        if rank in env:
            return launcher, _number(env, rank), _number(env, world)
    raise InputError(
        "--rendezvous needs a launcher: start all processes with torchrun, srun or a LeaderWorkerSet, "
        "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InputError(f"{name} is {text!r} in the environment, which is no number" if text else f"{name} is not set")
    return int(text)


def _master(env: Mapping[str, str], launcher: str) -> str:
    """Return the host of rank 0."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if launcher == "Slurm" and (nodes := env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")):
        return _first_host(nodes)
    if launcher == "LeaderWorkerSet" and env.get("LWS_LEADER_ADDRESS"):
        return env["LWS_LEADER_ADDRESS"]
    raise InputError(f"MASTER_ADDR is not set, nor does {launcher} say where rank 0 is; set it to rank 0's host")


def _port(env: Mapping[str, str], launcher: str) -> int:
    if env.get("MASTER_PORT"):
        port = _number(env, "MASTER_PORT")
        if not 0 < port < 65536:
            raise InputError(f"MASTER_PORT {port} is no port")
        return port
    if launcher == "Slurm" and env.get("SLURM_JOB_ID"):
        # Two jobs that share a host must not meet.
        return _SLURM_PORTS[_number(env, "SLURM_JOB_ID") % len(_SLURM_PORTS)]
    return DEFAULT_PORT


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm list as node[03-05,7],other: by Slurm's own tool, where it is there."""
    try:
        told = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_S,
            check=True,
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        told = []
    if told:
        return told[0]
    match = re.fullmatch(r"([^\[\],]+)(?:\[([0-9]+)[^\]]*\])?([^\[\],]*)(?:,.*)?", nodes)
    if match is None:
        raise InputError(f"the first host of {nodes!r} cannot be told; set MASTER_ADDR to it")
    return match[1] + (match[2] or "") + match[3]

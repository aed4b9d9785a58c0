"""Each mover with a scattered request against what others, or the machine itself, make of the same bytes.

256 MiB of a Llama-3-8B cache, 8,192 runs of 32 KiB, put layer by layer; beside it DeepSeek-V3 MLA, 7,808 of 18 KiB.
"""

from collections.abc import Mapping

from benchmarks.contest import Measured, compare, measure_in_turns
from benchmarks.pair import MoverPair
from benchmarks.peers import BulkSocket, Memcpy, MooncakePeer, NixlPeer, Peer, UcxPerftest
from benchmarks.peers.nixl_peer import Op
from benchmarks.rows import Row
from benchmarks.settings import Settings
from benchmarks.workload import DEEPSEEK_CASE, LLAMA_CASE, Case

UCX_TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}

_KERNEL_COPIES = (
    "the kernel copies every byte into and out of socket buffers, on one core of either side; "
    "a socket in bulk does the same with fewer and larger pieces"
)
_MEMORY = (
    "memory: one core's copy of runs, in pages of 4 KiB unless shmem_enabled gives shared memory huge ones, "
    "as the yardsticks' memory has"
)
_UCX_TCP = "UCX's tcp transport: a header and a system call for every few of the runs"
_CMA = "process_vm_writev of UCX: the kernel looks up the pages of every run"
_HOT_BUFFER, _COLD_BUFFER = 64 << 20, 1 << 30
_PERFTEST_BYTES = 2 << 30
_QUICK_PERFTEST_BYTES = 8 << 20

_NIXL_WAYS: dict[str, tuple[Op, int]] = {
    "NIXL READ 0": ("READ", 0),
    "NIXL READ 4": ("READ", 4),
    "NIXL WRITE 0": ("WRITE", 0),
    "NIXL WRITE 4": ("WRITE", 4),
}
"""Operation, and threads of the backend's own: vLLM has 4 and READ."""


def tcp(settings: Settings) -> list[Row]:
    """TCP against a plain socket, NIXL and Mooncake; two streams and get beside it."""
    case = settings.case(LLAMA_CASE)
    peers = case.of_peers()
    got = measure_in_turns(
        {
            "put": MoverPair("tcp", case),
            "socket": BulkSocket(case.nbytes),
            "get": MoverPair("tcp", case, operation="get"),
            "streams": MoverPair("tcp", case, options={"streams": 2}),
            "NIXL READ": NixlPeer("READ", tls="tcp", workload=peers),
            "NIXL WRITE": NixlPeer("WRITE", tls="tcp", workload=peers),
            "NIXL READ lo": NixlPeer("READ", tls="tcp", devices="lo", workload=peers),
            "NIXL WRITE lo": NixlPeer("WRITE", tls="tcp", devices="lo", workload=peers),
            "Mooncake": MooncakePeer(peers),
        },
        settings.rounds,
        needed=("put", "get", "streams"),
    )
    put, socket = got["put"], got["socket"]
    nixl, on_loopback = ((got[f"NIXL READ{where}"], got[f"NIXL WRITE{where}"]) for where in ("", " lo"))
    return [
        compare("tcp put : plain socket", put, socket, at_least=0.9, limit=_KERNEL_COPIES),
        compare("tcp put : NIXL over tcp", put, *nixl, at_least=4.0, limit=_KERNEL_COPIES),
        compare("tcp put : NIXL over tcp, on loopback alone", put, *on_loopback),
        compare("tcp put : Mooncake over tcp", put, got["Mooncake"], at_least=3.0, limit=_KERNEL_COPIES),
        compare("tcp get : plain socket", got["get"], socket),
        compare("tcp put 2 streams : plain socket", got["streams"], socket),
    ]


def shm(settings: Settings) -> list[Row]:
    """Shared memory against a copy of the same runs within one process, and NIXL on one host."""
    case = settings.case(LLAMA_CASE)
    got = measure_in_turns(
        {
            "put": MoverPair("shm", case),
            "memcpy": Memcpy("c", case.of_peers()),
            "one thread": MoverPair("shm", case, options={"threads": 1}),
            "get": MoverPair("shm", case, operation="get"),
            **_nixl_on_one_host(case, "READ", "WRITE"),
        },
        settings.rounds,
        needed=("put", "one thread", "get"),
    )
    return [
        compare("shm put : memcpy", got["put"], got["memcpy"], at_least=0.85, limit=_MEMORY),
        compare("shm put 1 thread : memcpy", got["one thread"], got["memcpy"], limit=_MEMORY),
        compare("shm put : NIXL on one host", got["put"], *_nixl_of(got), at_least=1.5, limit=_MEMORY),
        compare("shm get : memcpy", got["get"], got["memcpy"]),
    ]


def ucx_tcp(settings: Settings) -> list[Row]:
    """UCX over TCP against UCX's own benchmark with 32 KiB."""
    case = settings.case(LLAMA_CASE)
    got = measure_in_turns(
        {
            "put": MoverPair("ucx", case, environment=UCX_TCP),
            "perftest": UcxPerftest("ucp_put_bw", size=32 << 10, tls="tcp", total_bytes=_perftest_bytes(settings)),
            "get": MoverPair("ucx", case, environment=UCX_TCP, operation="get"),
        },
        settings.rounds,
        needed=("put", "get"),
    )
    return [
        compare("ucx put over tcp : ucx_perftest", got["put"], got["perftest"], at_least=0.95, limit=_UCX_TCP),
        compare("ucx get over tcp : ucx_perftest", got["get"], got["perftest"]),
    ]


def ucx_host(settings: Settings) -> list[Row]:
    """UCX on one host against NIXL, and UCX's own benchmark with buffers that large caches hold, and that none does."""
    case = settings.case(LLAMA_CASE)
    size = 1 << 20 if settings.quick else _HOT_BUFFER
    got = measure_in_turns(
        {
            "put": MoverPair("ucx", case),
            "perftest": UcxPerftest("ucp_put_bw", size=size, total_bytes=_perftest_bytes(settings)),
            "cold": UcxPerftest(
                "ucp_put_bw", size=size if settings.quick else _COLD_BUFFER, total_bytes=_perftest_bytes(settings)
            ),
            "get": MoverPair("ucx", case, operation="get"),
            "nixl mover": MoverPair("nixl", case),
            **_nixl_on_one_host(case, "WRITE"),
        },
        settings.rounds,
        needed=("put", "get", "nixl mover"),
    )
    return [
        compare("ucx put on one host : ucx_perftest", got["put"], got["perftest"], at_least=0.9, limit=_CMA),
        compare("ucx put on one host : ucx_perftest, 1 GiB", got["put"], got["cold"]),
        compare("ucx put on one host : NIXL WRITE", got["put"], got["NIXL WRITE 0"], at_least=1.2, limit=_CMA),
        compare("ucx put on one host : NIXL WRITE 4 threads", got["put"], got["NIXL WRITE 4"]),
        compare("ucx get on one host : ucx_perftest", got["get"], got["perftest"]),
        compare("nixl put on one host : NIXL WRITE", got["nixl mover"], got["NIXL WRITE 0"]),
    ]


def mla(settings: Settings) -> list[Row]:
    """DeepSeek-V3's latent vectors: every mover, no bar."""
    case = settings.case(DEEPSEEK_CASE)
    peers = case.of_peers()
    got = measure_in_turns(
        {
            "tcp": MoverPair("tcp", case),
            "socket": BulkSocket(case.nbytes),
            "shm": MoverPair("shm", case),
            "memcpy": Memcpy("c", peers),
            "ucx": MoverPair("ucx", case),
            "ucx tcp": MoverPair("ucx", case, environment=UCX_TCP),
            "NIXL tcp": NixlPeer("WRITE", tls="tcp", devices="lo", workload=peers),
            "Mooncake": MooncakePeer(peers),
            **_nixl_on_one_host(case, "WRITE"),
        },
        settings.rounds,
        needed=("tcp", "shm", "ucx", "ucx tcp"),
    )
    nixl = _nixl_of(got)
    return [
        compare("MLA tcp put : plain socket", got["tcp"], got["socket"]),
        compare("MLA tcp put : NIXL over tcp", got["tcp"], got["NIXL tcp"]),
        compare("MLA tcp put : Mooncake over tcp", got["tcp"], got["Mooncake"]),
        compare("MLA shm put : memcpy", got["shm"], got["memcpy"]),
        compare("MLA shm put : NIXL on one host", got["shm"], *nixl),
        compare("MLA ucx put over tcp : plain socket", got["ucx tcp"], got["socket"]),
        compare("MLA ucx put on one host : NIXL on one host", got["ucx"], *nixl),
    ]


def _nixl_on_one_host(case: Case, *operations: Op) -> dict[str, Peer]:
    peers = case.of_peers()
    return {
        key: NixlPeer(operation, threads=threads, workload=peers)
        for key, (operation, threads) in _NIXL_WAYS.items()
        if operation in operations
    }


def _nixl_of(got: Mapping[str, Measured]) -> list[Measured]:
    return [got[key] for key in _NIXL_WAYS if key in got]


def _perftest_bytes(settings: Settings) -> int:
    return _QUICK_PERFTEST_BYTES if settings.quick else _PERFTEST_BYTES

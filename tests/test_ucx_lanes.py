"""UCX's own descriptions, as this machine and others print them, and what is read from them."""

import pytest

from pdtx.transports.base import PathKind
from pdtx.transports.ucx.lanes import Lane, lanes_of_context, route_of_endpoint, route_of_request

PUT = "{proto|init} put from host memory length 32768 "

TWO_LANES = """
#
# UCP endpoint
#
#               peer: <no debug data>
#                 lane[0]:  2:tcp/lo.0 md[1]                -> md[1]/tcp/sysdev[255] seg 4294967295 am keepalive wireup
#                 lane[1]:  5:cma/memory.0 md[4]            -> md[4]/cma/sysdev[255] seg 4294967295 rma_bw#0
#
"""

ONE_LANE = """
#                 lane[0]:  0:tcp/lo.0 md[0]                -> md[0]/tcp/sysdev[255] am am_bw#0 keepalive wireup
#                  rma_bw: mds #
"""

CONTEXT = """
#     component 0  :  self
#            md 0  :  component 0  self
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 1  dev 2  flags -- tcp/lo
#      resource 3  :  md 2  dev 0  flags -- sysv/memory
#      resource 6  :  md 4  dev 3  flags -- rc_mlx5/mlx5_0:1
"""


@pytest.mark.parametrize(
    ("description", "kind", "detail", "emulated"),
    [
        (PUT + "zero-copy tcp/lo 11.6 MB/s 2684.01 us", "tcp", "tcp/lo", False),
        (PUT + "software emulation tcp/lo 11.4 MB/s 2736.31 us", "tcp", "tcp/lo", True),
        (PUT + "zero-copy cma/memory 9207.6 MB/s 3.39 us", "shm", "cma/memory", False),
        (PUT + "zero-copy rc_mlx5/mlx5_0:1 22.1 GB/s 2 us", "rdma", "rc_mlx5/mlx5_0:1", False),
        (
            PUT + "multi-frag zero-copy 50% on tcp/lo and 50% on tcp/eth0 1 MB/s 3 us",
            "tcp",
            "tcp/lo + tcp/eth0",
            False,
        ),
        (PUT + "zero-copy rc_mlx5/mlx5_0:1 and tcp/eth0 1 MB/s 3 us", "tcp", "rc_mlx5/mlx5_0:1 + tcp/eth0", False),
        (
            PUT + "cuda_copy/cuda, zero-copy rc_verbs/rxe0:1 1 MB/s 3 us",
            "rdma",
            "cuda_copy/cuda + rc_verbs/rxe0:1",
            False,
        ),
    ],
)
def test_request(description: str, kind: PathKind, detail: str, emulated: bool) -> None:
    route = route_of_request(description)
    assert route is not None
    assert (route.kind, route.detail, route.emulated) == (kind, detail, emulated)


@pytest.mark.parametrize("description", ["", "{} <no debug info>", "{cpml} <no debug info> tcp/lo"])
def test_request_of_which_ucx_says_nothing(description: str) -> None:
    assert route_of_request(description) is None


def test_endpoint_lane_for_puts() -> None:
    route = route_of_endpoint(TWO_LANES)
    assert (route.kind, route.detail, route.emulated) == ("shm", "cma/memory", False)


def test_endpoint_without_lane_for_puts_emulates_them() -> None:
    route = route_of_endpoint(ONE_LANE)
    assert (route.kind, route.detail, route.emulated) == ("tcp", "tcp/lo", True)


def test_endpoint_that_says_nothing() -> None:
    route = route_of_endpoint("")
    assert (route.kind, route.detail, route.emulated) == ("other", "unknown", True)


def test_context() -> None:
    lanes = lanes_of_context(CONTEXT)
    assert [str(lane) for lane in lanes] == ["self/memory", "tcp/eth0", "tcp/lo", "sysv/memory", "rc_mlx5/mlx5_0:1"]


@pytest.mark.parametrize(
    ("transport", "kind"),
    [
        *(
            (name, "rdma")
            for name in ("rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5", "srd", "gga_mlx5", "rc_gda")
        ),
        *((name, "shm") for name in ("posix", "sysv", "cma", "knem", "xpmem", "cuda_ipc", "self")),
        ("tcp", "tcp"),
        *((name, "other") for name in ("cuda_copy", "gdr_copy", "pigeon")),
    ],
)
def test_kinds(transport: str, kind: PathKind) -> None:
    assert Lane(transport, "x").kind == kind

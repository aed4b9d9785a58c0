import inspect
from typing import cast

import pytest

from pdtx import errors
from pdtx.errors import (
    CacheError,
    ConfigError,
    DeadlineExceeded,
    IncompatiblePeer,
    InputError,
    LayoutError,
    ModelError,
    OutOfBlocks,
    ParallelError,
    PdtxError,
    PeerError,
    PeerLost,
    PeerUnreachable,
    PlanError,
    PoolTooSmall,
    ProtocolError,
    SpecError,
    StaleBlocks,
    TransferAborted,
    TransferError,
    TransferRefused,
    VerificationError,
    WrongTransport,
)

ALL = cast("list[type[PdtxError]]", [cls for _, cls in inspect.getmembers(errors, inspect.isclass)])


@pytest.mark.parametrize("cls", ALL)
def test_every_error_is_a_pdtx_error_and_documented(cls: type[Exception]) -> None:
    assert issubclass(cls, PdtxError)
    assert cls.__doc__
    assert errors.__doc__ is not None
    assert cls.__name__ in errors.__doc__, "missing in the tree at the head of the module"


@pytest.mark.parametrize(
    ("parent", "children"),
    [
        (InputError, [SpecError, LayoutError, PlanError, ModelError, WrongTransport]),
        (CacheError, [OutOfBlocks, StaleBlocks]),
        (ProtocolError, [IncompatiblePeer]),
        (PeerError, [PeerUnreachable, PeerLost]),
        (TransferError, [TransferAborted, TransferRefused, DeadlineExceeded]),
    ],
)
def test_tree(parent: type[PdtxError], children: list[type[PdtxError]]) -> None:
    assert [child for child in children if child.__base__ is not parent] == []


def test_exit_codes() -> None:
    usage = {cls for cls in ALL if cls.exit_code == 2}
    usual = {InputError, SpecError, LayoutError, ParallelError, PlanError, PoolTooSmall, ModelError, IncompatiblePeer}
    usual |= {WrongTransport, ConfigError}
    assert usage == usual
    assert {cls.exit_code for cls in ALL} == {1, 2}


def test_incompatible_peer_names_the_field_and_both_values() -> None:
    error = IncompatiblePeer("dtype", "bfloat16", "float16", "start both with one --dtype")
    assert (error.field, error.producer, error.consumer) == ("dtype", "bfloat16", "float16")
    assert str(error) == (
        "incompatible peers: dtype is bfloat16 on the prefill side and float16 on the decode side; "
        "start both with one --dtype"
    )
    assert str(IncompatiblePeer("dtype", "a", "b")).endswith("b on the decode side")


def test_deadline_names_phase_peer_and_time() -> None:
    error = DeadlineExceeded("layer 3", "decode-0", 5.0, "12 of 64 bytes")
    assert (error.phase, error.peer, error.seconds) == ("layer 3", "decode-0", 5.0)
    assert str(error) == "deadline of 5 s exceeded while waiting for layer 3 from decode-0 (12 of 64 bytes)"
    assert str(DeadlineExceeded("x", "y", 0.5)) == "deadline of 0.5 s exceeded while waiting for x from y"


def test_verification_error_counts() -> None:
    error = VerificationError("layer 0 K token 0", 7)
    assert error.wrong == 7
    assert str(error) == "layer 0 K token 0"

"""UCX's status codes, as pdtx's errors."""

from pdtx.errors import PdtxError, PeerLost, TransferError

OK = 0
IN_PROGRESS = 1
IO_ERROR = -3
NO_MEMORY = -4
UNREACHABLE = -6
NO_DEVICE = -14
BUSY = -15
CANCELED = -16
TIMED_OUT = -20
REJECTED = -23
NOT_CONNECTED = -24
CONNECTION_RESET = -25
LINK_FAILURES = range(-59, -39)
ENDPOINT_FAILURES = range(-89, -59)

_FIRST_ERROR_POINTER = (1 << 64) - 100
# Nobody cancels a transfer here but UCX, when an endpoint breaks.
_LOST = {
    CANCELED,
    IO_ERROR,
    UNREACHABLE,
    TIMED_OUT,
    REJECTED,
    NOT_CONNECTED,
    CONNECTION_RESET,
    *LINK_FAILURES,
    *ENDPOINT_FAILURES,
}


class UcsError(TransferError):
    """A function of UCX failed. status: its code; reason: UCX's own words for it."""

    def __init__(self, doing: str, status: int, reason: str) -> None:
        self.doing, self.status, self.reason = doing, status, reason
        super().__init__(f"UCX failed to {doing}: {reason}")


def pointer_error(pointer: int) -> int:
    """Return the error that a request pointer stands for, or OK: UCX uses the last hundred addresses for errors."""
    return pointer - (1 << 64) if pointer >= _FIRST_ERROR_POINTER else OK


def error_of(error: UcsError, peer: str) -> PdtxError:
    """Return a failure of an operation with a peer as the error that it is for pdtx."""
    if error.status in _LOST:
        return PeerLost(f"{peer} is gone: {error}")
    return TransferError(f"{error} (peer {peer})")

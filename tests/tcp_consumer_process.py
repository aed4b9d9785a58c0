"""A consumer in a process of its own, for tests that kill or stop it: python -m tests.tcp_consumer_process TOKEN."""

import sys
import time

import torch

from pdtx.errors import PdtxError
from pdtx.plan import Slices
from pdtx.plan.runs import Int64s
from pdtx.transports import Placement, Region, TransferKey
from pdtx.transports.tcp import TcpMover

SESSION = "session"
NBYTES = 64 << 20


class _Slow:
    """Grants everything: layer 0 goes straight into memory, layer 1 is taken only after a minute."""

    def __init__(self, token: bytes, slices: Slices) -> None:
        self._token, self._slices = token, slices
        self._region = Region(torch.zeros(NBYTES, dtype=torch.uint8))

    def admit(self, session_id: str) -> bytes:
        return self._token

    def place(self, session_id: str, key: TransferKey) -> Placement:
        if key.layer_start == 1:
            time.sleep(60)
        return Placement(self._region, self._slices)

    def placed(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        pass

    def offer(self, session_id: str, key: TransferKey) -> Placement:
        return self.place(session_id, key)

    def offered(self, session_id: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        pass

    def notified(self, session_id: str, data: bytes) -> None:
        pass

    def closed(self, session_id: str, reason: str) -> None:
        pass


def whole() -> tuple[Int64s, Int64s]:
    """Offsets and lengths of the whole region as one range."""
    from numpy import array, int64

    return array([0], int64), array([NBYTES], int64)


def main() -> None:
    mover = TcpMover()
    address = mover.listen("127.0.0.1:0", _Slow(bytes.fromhex(sys.argv[1]), Slices(*whole())))
    sys.stdout.write(address + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    mover.close()


if __name__ == "__main__":
    main()

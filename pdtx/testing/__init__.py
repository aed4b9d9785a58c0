"""What a mover must do, as checks that anyone's mover can be held to, and what such checks are made of.

from pdtx.testing import check_mover
check_mover(lambda: MyMover())
"""

from pdtx.testing.codes import check_codes, code_rows, fill_codes
from pdtx.testing.contract import CONTRACT, FAULTS, Subject, check_faults, check_mover
from pdtx.testing.pair import ContractViolation, MakeMover, MoverPair, require
from pdtx.testing.receivers import FaultyReceiver, Gate, GrantingReceiver, Placed
from pdtx.testing.scene import BufferScene, Scene
from pdtx.testing.wrapped import WrappedConnection

__all__ = [
    "CONTRACT",
    "FAULTS",
    "BufferScene",
    "ContractViolation",
    "FaultyReceiver",
    "Gate",
    "GrantingReceiver",
    "MakeMover",
    "MoverPair",
    "Placed",
    "Scene",
    "Subject",
    "WrappedConnection",
    "check_codes",
    "check_faults",
    "check_mover",
    "code_rows",
    "fill_codes",
    "require",
]

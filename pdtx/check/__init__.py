"""check_transfer: hold somebody's own code that moves blocks against what two caches should contain afterwards."""

from pdtx.check.report import Stray, TransferReport, WrongRun
from pdtx.check.transfer import check_transfer

__all__ = ["Stray", "TransferReport", "WrongRun", "check_transfer"]

"""Peers that are killed or stopped, for every mover that crosses processes."""

import pytest

from pdtx.testing.contract import Check
from pdtx.testing.contract.faults import FAULTS
from tests.contract_subjects import FAULT_SUBJECTS, sampled, usable


@pytest.mark.parametrize("check", FAULTS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", sampled(FAULT_SUBJECTS, ("tcp-2", "tcp-bounce-1MiB", "shm")))
def test_faults(name: str, check: Check) -> None:
    check(usable(name))

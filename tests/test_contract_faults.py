"""Peers that are killed or stopped, for every mover that crosses processes."""

import pytest

from pdtx.testing.contract import Check
from pdtx.testing.contract.faults import FAULTS
from tests.contract_subjects import FAULT_SUBJECTS, usable


@pytest.mark.parametrize("check", FAULTS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", FAULT_SUBJECTS)
def test_faults(name: str, check: Check) -> None:
    check(usable(name))

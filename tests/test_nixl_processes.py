"""NIXL between processes that reach each other's memory by themselves (cma): killed and stopped peers.

tests/test_contract_faults.py does the same over tcp, and there with a stopped producer as well: one that writes by
itself cannot be cut off, so that its memory stays taken until it goes on or ends.
"""

import pytest

from pdtx.testing.contract import Check
from pdtx.testing.contract.faults import check_killed_consumer, check_killed_producer, check_stopped_consumer
from tests.contract_subjects import usable
from tests.nixl_links import needs_nixl

pytestmark = needs_nixl


@pytest.mark.parametrize("check", [check_killed_consumer, check_stopped_consumer, check_killed_producer])
def test_faults(check: Check) -> None:
    check(usable("nixl"))

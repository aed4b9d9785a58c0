"""Every built-in mover passes the contract, and the contract catches movers that are broken."""

from collections.abc import Callable

import pytest

from pdtx.testing import CONTRACT, Subject
from pdtx.transports import make_mover

SUBJECTS = {
    "inproc": Subject(lambda: make_mover("inproc")),
    "tcp": Subject(lambda: make_mover("tcp")),
    "tcp-v6": Subject(lambda: make_mover("tcp"), "[::1]:0"),
    "tcp-bounce": Subject(lambda: make_mover("tcp", bounce=True, bounce_bytes=20_000)),
}


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS.keys())
def test_contract(subject: Subject, check: Callable[[Subject], None]) -> None:
    check(subject)

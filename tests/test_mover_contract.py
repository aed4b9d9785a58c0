"""Every built-in mover passes the contract, and the contract catches movers that are broken."""

from collections.abc import Callable

import pytest

from pdtx.errors import InputError
from pdtx.testing import CONTRACT, ContractViolation, Subject, check_mover
from pdtx.transports import Mover, make_mover
from tests.broken_movers import DropsTheLastRun, ReportsDoneTooEarly, SwapsTwoRuns, WritesOutside

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


@pytest.mark.parametrize("broken", [SwapsTwoRuns, DropsTheLastRun, WritesOutside, ReportsDoneTooEarly])
def test_contract_catches_a_broken_mover(broken: type[Mover]) -> None:
    with pytest.raises(ContractViolation):
        check_mover(broken)


def test_unknown_mover_names_those_there_are() -> None:
    with pytest.raises(InputError, match="unknown mover 'pigeon'; one of inproc, tcp"):
        make_mover("pigeon")


def test_unknown_option_is_an_input_error() -> None:
    with pytest.raises(InputError, match="wings"):
        make_mover("tcp", wings=2)

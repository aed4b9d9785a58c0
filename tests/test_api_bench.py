"""pdtx.bench.run: the same sweep as `pdtx bench`, from Python, and silent."""

from collections.abc import Mapping
from typing import Any

import pytest
from typer.main import get_command

import pdtx
from pdtx.bench.flags import DEFAULT_TOKENS, DEFAULTS, Flags, flags_of
from pdtx.bench.measuring import Observer
from pdtx.cli.bench import app
from pdtx.results.model import Case, CaseResult

_PRINTING = {
    "config",
    "print_config",
    "json",
    "output",
    "force",
    "gbits",
    "help",
    "install_completion",
    "show_completion",
}
_SMALL: Mapping[str, Any] = {"layers": 1, "tokens": [32, 64], "iterations": 3, "warmup": 1, "reference": "none"}


def options() -> dict[str, Any]:
    """Return the defaults of the command's options, by flag, as typer has them."""
    found = {}
    for option in get_command(app).params:
        if option.name not in _PRINTING and option.name is not None:
            found[option.name.replace("_", "-")] = option.default
    return found


def test_the_defaults_are_the_command_s() -> None:
    given = {flag: value for flag, value in options().items() if value not in (None, (), [])}
    given = {flag: value for flag, value in given.items() if flag not in ("local", "rendezvous")}
    assert dict(DEFAULTS) == given


def test_every_flag_of_the_command_but_a_launcher_s_can_be_given() -> None:
    for flag in options():
        value: Any = {"verify": "off", "isolated": "on", "insecure": "on", "local": "on"}.get(flag, 1)
        if flag in ("rendezvous", "advertise"):
            with pytest.raises(pdtx.InputError, match=flag):
                flags_of(None, {flag: value})
        else:
            assert flag in flags_of(None, {flag: value}).values


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tokenz": 5}, "no 'tokenz'; the nearest is tokens"),
        ({"iterations": 0}, r"iterations must lie in 1\.\.1e\+06, not 0"),
        ({"iterations": "many"}, "iterations must be a number, not 'many'"),
        ({"verify": "maybe"}, "verify must be true or false, not 'maybe'"),
        ({"deadline": 0.1}, "deadline must lie in 1"),
    ],
)
def test_what_cannot_be_used_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(pdtx.InputError, match=text):
        flags_of(None, given)


def test_flags_come_before_the_config_and_replace_other_sizes() -> None:
    flags = flags_of({"bytes": "1MiB", "layers": 4}, {"tokens": [1, 2], "iterations": 5})
    assert flags["tokens"] == "1,2"
    assert flags["bytes"] is None
    assert (flags["layers"], flags["iterations"], flags["warmup"]) == ("4", 5, 3)
    assert flags_of(None, {})["tokens"] == DEFAULT_TOKENS
    assert flags_of("quick", {})["iterations"] == 7


def test_lists_and_switches_are_texts_as_the_command_has_them() -> None:
    flags = flags_of({"merge": [True, False], "mover_option": {"streams": 2}, "label": "a=b"}, {})
    assert flags["merge"] == "on,off"
    assert flags.pairs("mover-option") == {"streams": "2"}
    assert flags.pairs("label") == {"a": "b"}
    assert isinstance(flags, Flags)


class Seen(Observer):
    """Keeps what it learns."""

    def __init__(self) -> None:
        self.cases = list[Case]()
        self.found = list[CaseResult]()

    def case(self, case: Case) -> None:
        self.cases.append(case)

    def done(self, found: CaseResult) -> None:
        self.found.append(found)


def test_a_sweep_is_measured_verified_and_silent(capfd: pytest.CaptureFixture[str]) -> None:
    seen, lines = Seen(), list[str]()
    result = pdtx.bench.run(_SMALL, observer=seen, log=lines.append)
    assert capfd.readouterr() == ("", "")
    assert result.complete
    assert [case.case.tokens for case in result.cases] == [32, 64]
    assert [case.error for case in result.cases] == [None, None]
    assert [sum(not sample.warmup for sample in case.samples) for case in result.cases] == [3, 3]
    assert all(sample.wrong == 0 for case in result.cases for sample in case.samples)
    assert [case.tokens for case in seen.cases] == [32, 64]
    assert seen.found == result.cases
    assert result.seconds > 0
    assert any("starting 1 prefill" in line for line in lines)
    pdtx.bench.judge(result)


def test_agents_that_do_not_start_are_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pdtx.PdtxError, match="elephants"):
        pdtx.bench.run(_SMALL, device="elephants")
    assert capfd.readouterr() == ("", "")


def test_a_sweep_of_nothing_possible_starts_no_agents() -> None:
    with pytest.raises(pdtx.InputError, match="inproc works within one process"):
        pdtx.bench.run(_SMALL, mover="inproc", log=lambda line: pytest.fail(line))

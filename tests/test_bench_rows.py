"""Rows, turns and bars of the benchmarks: nothing is measured here."""

import fcntl
import json
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest

import benchmarks.__main__ as command
from benchmarks.contest import TIME, Measured, compare, measure_in_turns
from benchmarks.growth import cases, row_of_sizes
from benchmarks.modes import Load, costs_of
from benchmarks.peers import Peer
from benchmarks.rows import Row, machine_to_ourselves, table
from benchmarks.settings import Settings
from benchmarks.surroundings import surroundings
from pdtx.errors import InputError, PdtxError

GIB = 1 << 30


class Fake(Peer):
    """Takes seconds one after another; notes what is done in a list that others share."""

    def __init__(
        self, name: str, seconds: list[float], log: list[str], fails: Callable[[int], PdtxError | None]
    ) -> None:
        super().__init__(name, f"detail of {name}", nbytes=10**9)
        self._seconds, self._log, self._fails, self._rounds = seconds, log, fails, 0

    def start(self) -> None:
        self._log.append(f"+{self.name}")
        if error := self._fails(-1):
            raise error

    def round(self) -> float:
        self._log.append(self.name)
        if error := self._fails(self._rounds):
            raise error
        self._rounds += 1
        return self._seconds[(self._rounds - 1) % len(self._seconds)]

    def stop(self) -> None:
        self._log.append(f"-{self.name}")


def fakes(log: list[str], **errors: Callable[[int], PdtxError | None]) -> dict[str, Peer]:
    return {name: Fake(name, [1.0], log, errors.get(name, lambda _: None)) for name in "abc"}


def measured(name: str, seconds: list[float], **more: object) -> Measured:
    return replace(Measured(name, nbytes=10**9, seconds=seconds), **more)  # type: ignore[arg-type]


class TestRow:
    def test_the_ratio_is_that_of_the_medians(self) -> None:
        row = Row(name="n", unit="GB/s", ours=[1.0, 9.0, 2.0], reference=[4.0, 4.0, 1.0, 5.0], at_least=0.5)
        assert (row.value, row.reference_value, row.ratio, row.passed) == (2.0, 4.0, 0.5, True)
        assert not replace(row, at_least=0.51).passed

    def test_of_times_the_ratio_grows_as_they_shrink(self) -> None:
        row = Row(name="n", unit="ms", ours=[1.5], reference=[1.0], at_least=1 / 1.5, less_is_better=True)
        assert row.ratio == pytest.approx(2 / 3)
        assert row.passed
        assert not replace(row, ours=[1.51]).passed

    def test_one_wrong_element_fails_any_row(self) -> None:
        assert not Row(name="n", unit="GB/s", ours=[9.0], reference=[1.0], wrong=1).passed

    def test_without_figures_it_is_missed_and_says_why(self) -> None:
        row = Row(name="n", unit="GB/s", missing="not installed")
        assert (row.value, row.ratio, row.passed) == (None, None, False)
        assert "not measured: not installed" in table([row])

    def test_without_a_bar_nothing_can_be_missed(self) -> None:
        assert Row(name="n", unit="GB/s", ours=[1.0], reference=[100.0]).passed

    def test_json_has_the_agreed_fields_and_plain_numbers(self) -> None:
        row = Row(name="n", unit="GB/s", ours=[1.23456789], reference=[2.0], at_least=0.5, detail="d", limit="l")
        found = json.loads(json.dumps(row.as_json(), allow_nan=False))
        wanted = {
            "name",
            "value",
            "unit",
            "reference",
            "ratio",
            "at_least",
            "passed",
            "wrong",
            "detail",
            "rounds",
            "limit",
        }
        assert wanted <= found.keys()
        assert found["value"] == 1.23457
        assert found["rounds"] == {"ours": [1.23457], "reference": [2.0]}
        json.dumps(Row(name="n", unit="GB/s", missing="m").as_json(), allow_nan=False)

    def test_the_table_names_the_limit_of_what_is_missed_only(self) -> None:
        row = Row(name="n", unit="GB/s", ours=[1.0], reference=[2.0], at_least=0.9, limit="one core")
        assert "limited by: one core" in table([row])
        assert "limited by" not in table([replace(row, at_least=0.4)])


class TestTurns:
    def test_forwards_and_backwards_and_the_first_round_does_not_count(self) -> None:
        log = list[str]()
        got = measure_in_turns(fakes(log), 3)
        assert "".join(log) == "+a+b+c" + "cba" + "abc" + "cba" + "abc" + "-c-b-a"
        assert [len(one.seconds) for one in got.values()] == [3, 3, 3]

    def test_what_is_not_installed_is_left_out(self) -> None:
        log = list[str]()
        got = measure_in_turns(fakes(log, b=lambda at: InputError("no b here") if at < 0 else None), 1)
        assert (got["b"].missing, got["b"].failed, got["b"].seconds) == ("no b here", False, [])
        assert "b" not in log
        assert len(got["a"].seconds) == 1

    def test_what_breaks_is_stopped_at_once_and_has_no_figures(self) -> None:
        log = list[str]()
        got = measure_in_turns(fakes(log, b=lambda at: PdtxError("broke") if at == 2 else None), 4)
        assert (got["b"].missing, got["b"].failed, got["b"].seconds) == ("broke", True, [])
        assert log.count("b") == 3
        assert log[log.index("-b") - 1] == "b"
        assert len(got["a"].seconds) == 4

    def test_references_are_not_started_for_nothing(self) -> None:
        log = list[str]()
        got = measure_in_turns(fakes(log, b=lambda _: InputError("no b")), 2, needed=("b",))
        assert log == ["+b", "-b"]
        assert got["a"].missing == "there is nothing to compare it with"

    def test_those_needed_start_first_but_take_their_turn(self) -> None:
        log = list[str]()
        measure_in_turns(fakes(log), 1, needed=("c",))
        assert "".join(log) == "+c+a+b" + "cba" + "abc" + "-b-a-c"


class TestCompare:
    def test_against_the_fastest_reference(self) -> None:
        ours, slow, fast = measured("o", [0.5]), measured("slow", [2.0]), measured("fast", [1.0], wrong=2)
        row = compare("n", ours, slow, fast, at_least=2.0)
        assert (row.value, row.reference_value, row.ratio, row.wrong) == (2.0, 1.0, 2.0, 2)
        assert row.against.startswith("fast")
        assert "slow 0.5 GB/s" in row.detail

    def test_a_reference_that_is_missing_is_named(self) -> None:
        row = compare("n", measured("o", [1.0]), measured("b", [1.0]), measured("c", [], missing="not here"))
        assert row.passed
        assert "without c: not here" in row.detail

    def test_without_ours_or_any_reference_there_is_no_row(self) -> None:
        here, absent = measured("here", [1.0]), measured("absent", [], missing="gone", failed=True)
        for row in (compare("n", absent, here), compare("n", here, absent)):
            assert (row.missing, row.failed, row.passed) == ("absent: gone", True, False)

    def test_times_are_milliseconds(self) -> None:
        row = compare("n", measured("o", [0.003]), measured("r", [0.002]), at_least=0.6, figure=TIME)
        assert (row.value, row.unit) == (3.0, "ms")
        assert row.ratio == pytest.approx(2 / 3)


class TestGrowth:
    def test_as_many_layers_as_memory_allows(self) -> None:
        layers = {case.blocks: case.layers for case in cases(24 * GIB, Settings())}
        assert layers == {16: 32, 64: 32, 256: 32, 1024: 32, 4096: 8, 8192: 4}
        assert all(case.nbytes <= 24 * GIB // 10 for case in cases(24 * GIB, Settings()))

    def test_the_slowest_size_is_held_against_the_fastest(self) -> None:
        sizes = cases(24 * GIB, Settings())[:2]  # 16 and 64 blocks of 32 layers
        got = [
            measured("16", [0.016], nbytes=sizes[0].nbytes),
            measured("64", [0.080], nbytes=sizes[1].nbytes),
        ]
        row = row_of_sizes("growth", sizes, got)
        assert row.ratio == pytest.approx(0.8)
        assert not row.passed
        assert "16 x 32 31.25 us, 64 x 32 39.06 us" in row.detail

    def test_one_size_that_breaks_is_no_row(self) -> None:
        sizes = cases(24 * GIB, Settings())[:2]
        row = row_of_sizes("growth", sizes, [measured("16", [1.0]), measured("64", [], missing="m", failed=True)])
        assert (row.missing, row.failed) == ("64: m", True)


def test_costs_are_those_that_the_times_were_made_of() -> None:
    few, many = Load(100, 100, 10**8), Load(100_100, 500, 10**8)
    got = {
        "few": measured("few", [100 * 1e-6 + 0.05]),
        "many": measured("many", [100_100 * 1e-6 + 0.05]),
        "pack few": measured("pack few", [100 * 2e-8 + 0.01]),
        "pack many": measured("pack many", [100_100 * 2e-8 + 0.01]),
    }
    costs = costs_of(few, many, got)
    assert costs.run_s == pytest.approx(1e-6)
    assert costs.wire_bytes_per_s == pytest.approx(2e9)
    assert costs.pack_run_s == pytest.approx(2e-8)
    assert costs.pack_bytes_per_s == pytest.approx(1e10)
    noise = costs_of(few, many, got | {"many": measured("many", [0.04])})
    assert 0 < noise.run_s < 1e-9


class TestCommand:
    @pytest.fixture
    def rows(self, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
        """What the only benchmark there is returns."""
        rows = list[Row]()
        # Somebody may be measuring, and nothing is measured here.
        monkeypatch.setattr(command, "machine_to_ourselves", nullcontext)
        monkeypatch.setattr(command, "BENCHMARKS", {"one": lambda _: rows})
        return rows

    @pytest.mark.parametrize(
        ("row", "status"),
        [
            (Row(name="n", unit="u", ours=[1.0], reference=[1.0], at_least=1.0), {"": 0, "--quick": 0}),
            (Row(name="n", unit="u", ours=[1.0], reference=[2.0], at_least=1.0), {"": 1, "--quick": 0}),
            (Row(name="n", unit="u", ours=[1.0], reference=[1.0], wrong=1), {"": 1, "--quick": 1}),
            (Row(name="n", unit="u", missing="m"), {"": 1, "--allow-missing": 0}),
            (Row(name="n", unit="u", missing="m", failed=True), {"": 1, "--allow-missing": 1}),
        ],
    )
    def test_the_exit_status_tells(self, rows: list[Row], row: Row, status: dict[str, int]) -> None:
        rows.append(row)
        for option, expected in status.items():
            assert command.main([option] if option else []) == expected, option

    @pytest.mark.parametrize("options", ["--quick --write-costs", "--write-costs --only one"])
    def test_costs_that_mean_nothing_are_not_written(self, rows: list[Row], options: str) -> None:
        assert not rows
        with pytest.raises(SystemExit) as ended:
            command.main(options.split())
        assert ended.value.code == 2

    def test_the_result_file_has_surroundings_and_rows(self, rows: list[Row], tmp_path: os.PathLike[str]) -> None:
        rows.append(Row(name="n", unit="u", ours=[1.0], reference=[1.0]))
        file = os.path.join(tmp_path, "rows.json")
        assert command.main(["--json", file, "--only", "one", "--rounds", "7"]) == 0
        with open(file) as text:
            found = json.load(text)
        assert found.keys() == {"machine", "versions", "environment", "settings", "rows"}
        assert found["settings"] == {"rounds": 7, "quick": False}
        assert [row["name"] for row in found["rows"]] == ["n"]


def test_surroundings_tell_the_settings_but_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    found = surroundings(Settings())
    assert found["environment"]["UCX_TLS"] == "tcp"  # type: ignore[index]
    values = [value for part in found.values() if isinstance(part, dict) for value in part.values()]
    assert socket.gethostname() not in values


def test_nobody_else_measures_meanwhile(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    name = os.path.join(tmp_path, "pdtx-benchmarks.lock")
    with machine_to_ourselves(), open(name) as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

"""The file of measured costs, and what auto makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdtx.errors import InputError
from pdtx.plan import Costs, MeasuredCosts, costs_path, load_costs, save_costs

ROW: dict[str, Any] = {
    "mover": "tcp", "device": "cpu", "run_s": 1e-7, "wire_bytes_per_s": 3e9, "pack_run_s": 2e-8,
    "pack_bytes_per_s": 8e9,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "deep" / "costs.json"
    monkeypatch.setenv("PDTX_COSTS", str(path))
    return path


def test_what_is_saved_is_loaded(file: Path) -> None:
    assert save_costs([MeasuredCosts(**ROW, measured="here, today")]) == file == costs_path()
    costs, source = load_costs().of("tcp", "cpu")
    assert costs == Costs(run_s=1e-7, wire_bytes_per_s=3e9, pack_run_s=2e-8, pack_bytes_per_s=8e9)
    assert source == f"the costs in {file}"


def test_other_movers_and_devices_keep_theirs(file: Path) -> None:
    save_costs([MeasuredCosts(**ROW), MeasuredCosts(**{**ROW, "mover": "ucx"})])
    save_costs([MeasuredCosts(**{**ROW, "run_s": 5e-7}), MeasuredCosts(**{**ROW, "device": "cuda"})])
    table = load_costs(file)
    assert [table.of(*pair)[0].run_s for pair in (("tcp", "cpu"), ("ucx", "cpu"), ("tcp", "cuda"))] == [
        5e-7,
        1e-7,
        1e-7,
    ]
    assert table.of("nixl", "cpu")[1] == "default costs of nixl"


def test_without_a_file_there_are_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDTX_COSTS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert costs_path() == tmp_path / ".cache/pdtx/costs.json"
    table = load_costs()
    for mover in ("tcp", "shm", "ucx", "nixl", "inproc", "somebody's"):
        for device in ("cpu", "cuda"):
            costs, source = table.of(mover, device)
            assert source == f"default costs of {mover}"
            assert min(costs.run_s, costs.wire_bytes_per_s, costs.pack_run_s, costs.pack_bytes_per_s) > 0


def test_a_file_that_was_asked_for_must_be_there(file: Path) -> None:
    with pytest.raises(InputError, match=f"no costs at {file}; measure them there, or unset PDTX_COSTS"):
        load_costs()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ('{"version": 2, "costs": []}', r"version"),
        (json.dumps({"version": 1, "costs": [{**ROW, "run_s": -1}]}), r"costs\[0\]\.run_s"),
        (json.dumps({"version": 1, "costs": [{**ROW, "wire_bytes_per_s": 0}]}), r"costs\[0\]\.wire_bytes_per_s"),
        (json.dumps({"version": 1, "costs": [{**ROW, "pack_s": 1}]}), "pack_s"),
        (json.dumps({"version": 1, "costs": [{"mover": "tcp"}]}), "device"),
        ('{"costs": [' + " " * (1 << 20) + "]}", "more than 1048576 bytes"),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(file: Path, text: str, words: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        load_costs()
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_impossible_figures_are_not_saved(file: Path) -> None:
    with pytest.raises(InputError, match=r"costs\[0\]\.run_s"):
        save_costs([MeasuredCosts(**{**ROW, "run_s": 2.0})])
    assert not file.exists()


def test_a_broken_file_is_not_written_over(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("somebody's notes")
    with pytest.raises(InputError, match=str(file)):
        save_costs([MeasuredCosts(**ROW)])
    assert file.read_text() == "somebody's notes"

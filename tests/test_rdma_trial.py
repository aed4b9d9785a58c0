"""What a trial of RDMA takes for proof, and how it ends where there is no lab."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import rdma_nodes, rdma_report
from tests.rdma_children import Child
from tests.rdma_node import Node

_SCRIPT = Path(__file__).parent.parent / "scripts" / "test-rdma"
_RDMA = {"kind": "rdma", "detail": "rc_verbs/rxe0:1", "library": "UCX"}
_TCP = {"kind": "tcp", "detail": "tcp/eth0", "library": "UCX"}


@pytest.fixture(autouse=True)
def _rxe0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_nodes, "device", lambda: "rxe0")


def test_without_the_lab_it_is_skipped_at_once_with_the_reason(tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    (tmp_path / "python3").symlink_to(Path(sys.executable).resolve())
    begun = time.monotonic()
    done = subprocess.run([_SCRIPT], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 77, done.stderr
    assert done.stderr.startswith("test-rdma: skipped: the lab lacks ")
    assert time.monotonic() - begun < 5


_SEEMING = {
    "deploy/rdma-lab/run": '[ "$1" = --check ] && exit; echo $$ >>pids; exec sleep 300',
    "scripts/install": "exit 0",
    ".venv/bin/python": '[ "$3" != keygen ] || touch "$6/$4.key_secret"',
}


class Trial:
    """The script in a checkout whose lab only seems to be one, and stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, does in _SEEMING.items():
            program = folder / name
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(f"#!/bin/sh\n{does}\n")
            program.chmod(0o700)
        shutil.copy(_SCRIPT, folder / "scripts")

    def start(self) -> "subprocess.Popen[bytes]":
        with open(self.folder / "said", "wb") as said:
            return subprocess.Popen([self.folder / "scripts/test-rdma"], stderr=said)

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    @property
    def labs(self) -> list[int]:
        """Their processes, as soon as there is one."""
        limit = time.monotonic() + 20
        while not (self.folder / "pids").exists() or not (pids := (self.folder / "pids").read_text()):
            assert time.monotonic() < limit, self.said
            time.sleep(0.02)
        return [int(pid) for pid in pids.split()]

    @property
    def secrets(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "results/rdma").glob("*.key_secret"))


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    """Not begun; whatever labs a failed test leaves are killed."""
    made = Trial(tmp_path)
    yield made
    for pid in made.labs:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_signal_ends_the_lab_and_takes_the_keys_away(trial: Trial) -> None:
    with trial.start() as script:
        (lab,) = trial.labs
        assert trial.secrets == ["decode.key_secret", "prefill.key_secret"]
        script.terminate()
        assert script.wait(20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(lab, 0)
    assert trial.secrets == []


def test_a_lab_whose_script_was_killed_keeps_others_from_its_folder(trial: Trial) -> None:
    with trial.start() as script:
        (lab,) = trial.labs
        script.kill()
    os.kill(lab, 0)
    with trial.start() as second:
        try:
            assert second.wait(5) == 2
        finally:
            second.kill()
    assert "another run in this folder has not ended" in trial.said
    assert trial.secrets == ["decode.key_secret", "prefill.key_secret"]


@pytest.mark.parametrize(
    ("way", "path", "carried", "fine"),
    [
        ("ucx", _RDMA, ["rdma"], True),
        ("ucx", _TCP, ["rdma"], False),
        ("ucx", _RDMA, ["rdma", "tcp"], False),
        ("nixl", _RDMA | {"detail": "rc_verbs/mlx5_0:1"}, ["rdma"], False),
        ("control", _TCP, ["tcp"], True),
        ("control", _RDMA, ["rdma"], False),
    ],
)
def test_what_a_connection_says_must_be_so(way: str, path: dict[str, str], carried: list[str], fine: bool) -> None:
    assert (not rdma_nodes._path_problems(way, path, carried)) is fine


@pytest.mark.parametrize(
    ("way", "sent", "fine"),
    [("ucx", 375, True), ("ucx", 374, False), ("ucx", 0, False), ("control", 0, True), ("control", 1, False)],
)
def test_what_the_card_has_counted_must_be_so(way: str, sent: int, fine: bool) -> None:
    assert (not rdma_nodes._counter_problems(way, sent, 375)) is fine


def entry(**changes: object) -> dict[str, object]:
    path = {"kind": "rdma", "detail": "rc_verbs/rxe0:1", "library": "UCX 1.23.0"}
    facts = {"path": path, "nbytes": 4096, "wrong": {"n": 0}, "least_packets": 1, "counters": {"sent_pkts": 7}}
    return {"stage": "nodes", "name": "ucx", "ok": True, "problems": [], **facts, **changes}


@pytest.mark.parametrize(
    ("second", "ended", "fine"),
    [
        ([entry()], True, True),
        ([entry(ok=False, problems=["n: wrong 3"])], True, False),
        ([entry()], False, False),
        (None, False, False),
    ],
    ids=["well", "wrong", "cut off", "no report"],
)
def test_the_report_is_of_both_nodes(
    second: list[dict[str, object]] | None,
    ended: bool,
    fine: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number, reports, entries in ((1, True, [entry()]), (2, ended, second)):
        if entries is not None:
            whole = {"ended": reports, "entries": entries}
            (tmp_path / f"report.{number}.json").write_text(json.dumps(whole))
    monkeypatch.setattr(sys, "argv", ["rdma_report", str(tmp_path)])
    assert rdma_report.main() == (0 if fine else 1)
    told = capsys.readouterr().out
    assert (
        "rdma (rc_verbs/rxe0:1, UCX 1.23.0); 4096 bytes, wrong elements 0; card: 7 packets sent of at least 1" in told
    )
    assert ("FAIL node 2" in told) is not fine
    seen = json.loads((tmp_path / "report.json").read_text())
    assert len(seen) == 1 + len(second or ()) + (not ended)


def test_nodes_meet_and_do_not_wait_for_ever(tmp_path: Path) -> None:
    here, there = (Node(number, "", "", tmp_path) for number in (1, 2))
    there.tell("address", ["10.77.0.2", 5600])
    assert here.hear("address", 1) == ["10.77.0.2", 5600]
    with pytest.raises(TimeoutError, match=r"node 2 has not said 'nothing' within 0\.1 s"):
        here.hear("nothing", 0.1)


def _says() -> int:
    sys.stdout.write(f"UCX_TLS={os.environ['UCX_TLS']}")
    return 3


def _fails() -> None:
    raise ValueError("what went wrong")


@pytest.mark.parametrize(("does", "status"), [(_says, 3), (_fails, 1), (lambda: sys.exit("a line"), 1)])
def test_a_child_ends_with_its_status(does: Callable[[], object], status: int, tmp_path: Path) -> None:
    with Child("child", tmp_path, does, {"UCX_TLS": "rc,ud"}) as child:
        assert child.wait(20) == status
    words = {"_says": "UCX_TLS=rc,ud", "_fails": "ValueError: what went wrong", "<lambda>": "a line"}
    assert child.last_words() == words[does.__name__]


def test_a_child_that_stays_is_told_and_killed(tmp_path: Path) -> None:
    with Child("stays", tmp_path, lambda: time.sleep(60), {}) as child:
        with pytest.raises(TimeoutError, match=r"stays has not ended within 0\.2 s; it said nothing"):
            child.wait(0.2)
        child.end()
        assert child.wait(1) < 0


@pytest.mark.parametrize(
    "text", ["", '{"ended": tr', "[]", '{"ended": true, "entries": []}', '{"ended": true, "entries": [null]}']
)
def test_a_report_that_is_broken_or_says_nothing_is_a_failure_and_hides_no_other(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.1.json").write_text(text)
    (tmp_path / "report.2.json").write_text(json.dumps({"ended": True, "entries": [entry()]}))
    monkeypatch.setattr(sys, "argv", ["rdma_report", str(tmp_path)])
    assert rdma_report.main() == 1
    told = capsys.readouterr().out
    assert "FAIL node 1" in told
    assert "ok   node 2 nodes ucx" in told

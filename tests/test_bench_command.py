"""`pdtx bench`: flags, files and exit codes with a fleet that only pretends, and whole runs with real agents."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdtx.bench.agents import agent_counts, share_of_memory
from pdtx.bench.flags import Flags
from pdtx.bench.fleet import Progress
from pdtx.cli import app, bench_run
from pdtx.cli.bench_rows import RowTable
from pdtx.cli.common import run_app
from pdtx.errors import InputError, PdtxError, PeerLost
from pdtx.results.files import read_result_file
from pdtx.results.model import Case, CaseResult, Link, LinkSample, NodeFacts, Reference, Sample

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
TINY_TOKEN = 2 * 2 * 2 * 8 * 2
"""Bytes of a token: layers, K and V, heads, channels, bytes of an element."""

Run = Callable[..., tuple[int, str, str]]
During = Callable[["FakeFleet", CaseResult], None]


class FakeFleet:
    """Gives samples of 1 ms for a MiB; does, after each case's samples are there, what a test wants to happen."""

    def __init__(self) -> None:
        self.current: CaseResult | None = None
        self.failure: PdtxError | None = None
        self.max_bytes = 1 << 40
        self.asked = list[dict[str, Any]]()
        self.during: During = lambda fleet, result: None

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        return (
            NodeFacts(role="prefill", host="here", rank=0, facts={}),
            NodeFacts(role="decode", host="there", rank=0, facts={}),
        )

    def measure(
        self,
        case: Case,
        *,
        iterations: int,
        warmup: int,
        verify: bool,
        references: Sequence[str],
        deadline: float,
        told: Callable[[Progress], None],
    ) -> CaseResult:
        self.asked.append({"case": case, "verify": verify, "references": references, "deadline": deadline})
        result = CaseResult(case=case, iterations=iterations, warmup=warmup, verified=verify)
        self.current = result
        result.links.append(
            Link(prefill=0, decode=1, path={"kind": "tcp"}, wire_bytes=1 << 20, runs=32, run_sizes={"32768": 32})
        )
        for number in range(warmup + iterations):
            told(Progress("measure", number, iterations))
            result.samples.append(
                Sample(
                    iteration=number,
                    warmup=number < warmup,
                    wall_s=0.002,
                    links=[
                        LinkSample(
                            link=0, begun=0.0, ended=0.002, prepare_s=1e-4, post_s=2e-4, move_s=1e-3,
                            claimed_bytes=1 << 20, received_bytes=1 << 20,
                        )
                    ],
                    wrong=0 if verify else None,
                )
            )  # fmt: skip
        result.references.append(Reference(name="socket", nbytes=1 << 20, seconds=[5e-4], limits=True))
        self.during(self, result)
        self.current = None
        return result


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    found = FakeFleet()

    @contextmanager
    def opened(_: Flags) -> Iterator[FakeFleet]:
        yield found

    monkeypatch.setattr(bench_run, "open_fleet", opened)
    return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fleet: FakeFleet) -> Run:
    """Run `pdtx bench` in an empty folder; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pdtx", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_app(app, "pdtx")
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


class TestFlags:
    def test_command_line_before_environment_before_file_before_default(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("run.yaml").write_text("op: pull\nmover: shm\nbatch: 5\n")
        monkeypatch.setenv("PDTX_BENCH_MOVER", "ucx")
        monkeypatch.setenv("PDTX_BENCH_BATCH", "6")
        code, out, _ = run("--config", "run.yaml", "--batch", "7", "--print-config")
        lines = out.splitlines()
        assert code == 0
        assert {"batch: 7", "mover: ucx", "op: pull", "mode: auto"} <= set(lines)

    def test_what_is_printed_is_taken_again(self, run: Run) -> None:
        arguments = ("--bytes", "1MiB,2MiB", "--block-size", "16:32", "--mover-option", "streams=2", "--no-verify")
        _, printed, _ = run(*arguments, "--print-config")
        Path("again.yaml").write_text(printed)
        assert run("--config", "again.yaml", "--print-config")[1] == printed

    @pytest.mark.parametrize("name", ["quick", "sizes", "layouts", "fragmentation", "overlap"])
    def test_scenarios_can_be_measured(self, run: Run, fleet: FakeFleet, name: str) -> None:
        code, out, _ = run("--config", name, "--iterations", "1", "--warmup", "0")
        assert code == 0
        assert "skipped" not in out
        assert len(fleet.asked) > 1

    def test_a_size_on_the_command_line_goes_before_one_in_a_file(self, run: Run, fleet: FakeFleet) -> None:
        Path("run.yaml").write_text("bytes: 1MiB\n")
        assert run("--config", "run.yaml", "--tokens", "48")[0] == 0
        assert fleet.asked[0]["case"].tokens == 48
        code, _, err = run("--bytes", "1MiB", "--tokens", "48")
        assert code == 2
        assert "--tokens and --bytes both say" in err

    def test_a_value_in_a_file_must_be_of_its_kind(self, run: Run) -> None:
        Path("run.yaml").write_text("iterations: many\n")
        code, _, err = run("--config", "run.yaml")
        assert code == 2
        assert "--iterations" in err

    def test_unknown_names_are_told(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PDTX_BENCH_TOKEN", "5")
        assert "PDTX_BENCH_TOKEN in the environment is no flag" in run("--print-config")[2]
        Path("run.yaml").write_text("token: 5\n")
        code, _, err = run("--config", "run.yaml")
        assert code == 2
        assert err.endswith("run.yaml line 1: no flag 'token'; the nearest is tokens\n")

    def test_flags_before_a_subcommand_are_not_swallowed(self, run: Run) -> None:
        code, _, err = run("--tokens", "5", "tier")
        assert code == 2
        assert "--tokens stands before 'tier'" in err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--local", "--prefill", "a:1", "--decode", "b:1"), "do not go together"),
            (("--local", "--rendezvous"), "do not go together"),
            (("--prefill", "a:1"), "--prefill alone names one side only"),
            (("--prefill", "a:1,a:1", "--decode", "b:1"), "each once"),
            (("--mover-option", "streams"), "--mover-option takes KEY=VALUE"),
            (("--label", "a=1", "--label", "a=2"), "--label has 'a' twice"),
            (("--reference", "none,socket"), "says none and some"),
            (("--reference", "elephants"), "--reference takes auto"),
            (("--op", "shove"), "--op takes push, pull"),
            (("--tokens", "1_6"), "--tokens takes whole numbers, not '1_6'"),
            (("--tokens", "\u0661\u0666"), "--tokens takes whole numbers"),
            (("--mean-run", "1_6"), "--mean-run takes a mean length"),
            (("llama-3-8b",), "did you mean --model llama-3-8b?"),
        ],
    )
    def test_what_does_not_go_is_refused_before_anything_starts(
        self, run: Run, fleet: FakeFleet, arguments: tuple[str, ...], said: str
    ) -> None:
        code, _, err = run(*arguments)
        assert code == 2
        assert said in err
        assert not fleet.asked
        assert not list(Path().glob("results/*"))

    @pytest.mark.parametrize("given", [("--block-size", "16:24"), ("--model", "nope"), ("--mover", "nope")])
    def test_no_agent_is_started_for_a_sweep_of_which_nothing_can_be(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, given: tuple[str, str]
    ) -> None:
        def opened(_: Flags) -> Iterator[FakeFleet]:
            pytest.fail("agents were started")

        monkeypatch.setattr(bench_run, "open_fleet", opened)
        code, out, err = run("--tokens", "16,32", *given)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert "nothing could be measured: " in err
        assert not list(Path().glob("results/*"))

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--label", "run"), "--label takes KEY=VALUE, not 'run'"),
            (("--reference", "none,socket"), "says none and some"),
            (("--mover", "nope"), "nothing could be measured: "),
        ],
    )
    def test_a_process_that_only_serves_refuses_what_the_one_that_measures_does(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str], said: str
    ) -> None:
        """Or it would wait, to the end of --connect-timeout, for one that has ended."""
        monkeypatch.setattr(bench_run, "only_serves", lambda _: True)
        monkeypatch.setattr(bench_run, "serve", lambda _: pytest.fail("it waits for the others"))
        code, _, err = run("--rendezvous", *arguments)
        assert code == 2
        assert said in err

    def test_agents_are_counted(self) -> None:
        assert agent_counts(Flags({"prefill": "a:1,b:1", "decode": "c:1"})) == (2, 1)
        assert agent_counts(Flags({"prefill-agents": 3, "decode-agents": 4, "local": True})) == (3, 4)


class TestRows:
    def test_every_figure_has_its_column(self, run: Run) -> None:
        code, out, err = run("--tokens", "16,32", "--iterations", "2", "--warmup", "1")
        above, _, heads, *rows = out.splitlines()
        assert code == 0
        assert above.startswith(
            "model llama-3-8b, layers 8, dtype auto, block 16, layout flash_attn_nhd:flashinfer_nhd"
        )
        for head in ("tokens", "runs x each", "GB/s per rank", "GB/s whole", "% of ref", "#wrong", "via"):
            assert head in heads
        assert " ".join(rows[0].split()) == (
            "16 32 x 32 KiB 1 MiB 100 us 200 us 1 ms 1 ms 1 ms 1.049 0.524 50% socket 0 tcp"
        )
        assert "2 cases; 1 + 2 iterations each" in err

    @pytest.mark.parametrize(
        ("mode", "modes", "via"),
        [
            ("auto", {"staged": 8}, "tcp, staged"),
            ("auto", {"direct": 6, "staged": 2}, "tcp, direct 6, staged 2"),
            ("staged", {"staged": 8}, "tcp"),
        ],
    )
    def test_what_was_chosen_is_told(
        self, run: Run, fleet: FakeFleet, mode: str, modes: dict[str, int], via: str
    ) -> None:
        def choose(_: FakeFleet, result: CaseResult) -> None:
            result.links[0].modes.update(modes)

        fleet.during = choose
        assert run("--tokens", "16", "--mode", mode)[1].endswith(f"  0  {via}\n")

    def test_gbits(self, run: Run) -> None:
        _, out, _ = run("--tokens", "16", "--gbits")
        assert "Gb/s per rank" in out
        assert " 8.389 " in out

    def test_what_nobody_looked_at_is_told(self, run: Run, fleet: FakeFleet) -> None:
        _, out, err = run("--tokens", "16", "--no-verify")
        assert "unverified" in out
        assert "nothing is verified" in err
        assert fleet.asked[0]["verify"] is False

    def test_columns_stand_below_one_another(self) -> None:
        cases = [Case(tokens=tokens, block_size=size) for size in ((16, 16), (16, 32)) for tokens in (8, 128_000)]
        table = RowTable(cases)
        heads = table.heads()[-1]
        for case in cases:
            line = table.line(FakeFleet().measure(
                case, iterations=1, warmup=0, verify=True, references=(), deadline=0.0, told=lambda _: None
            ))  # fmt: skip
            assert line.index("tcp") == heads.index("via")
            assert line.startswith(f"{case.tokens:,} ")

    def test_a_skipped_case_says_why_and_the_others_are_measured(self, run: Run, fleet: FakeFleet) -> None:
        code, out, err = run("--tokens", "16", "--block-size", "16,16:24,16:32")
        assert code == 0
        assert "skipped: " in out.splitlines()[4]
        assert len(fleet.asked) == 2
        assert "2 cases, 1 skipped as impossible" in err

    def test_what_agents_cannot_hold_is_skipped(self, run: Run, fleet: FakeFleet) -> None:
        fleet.max_bytes = 1 << 20
        code, out, err = run("--tokens", "16,4096", "-o", "out.json")
        assert code == 2  # nothing is small enough for them
        assert not Path("out.json").exists()
        assert "may take 1 MiB" in out
        assert "nothing could be measured" in err


class TestEnds:
    def test_the_result_holds_everything(self, run: Run, fleet: FakeFleet) -> None:
        code, out, _ = run("--tokens", "16,32", "-o", "sub/out.json", "--label", "nic=cx7", "--json")
        assert code == 0
        result = read_result_file(Path("sub/out.json"))
        assert json.loads(out)["cases"][1]["case"]["tokens"] == 32
        assert result.complete
        assert result.label == "nic=cx7"
        assert result.config["tokens"] == ["16", "32"]
        assert [case.case.tokens for case in result.cases] == [16, 32]
        assert [node.role for node in result.nodes] == ["prefill", "decode"]
        assert len(result.cases[0].samples) == 23
        assert result.driver["pdtx"]

    def test_a_file_that_exists_is_kept(self, run: Run, fleet: FakeFleet) -> None:
        Path("out.json").write_text("mine")
        code, _, err = run("--tokens", "16", "-o", "out.json")
        assert (code, Path("out.json").read_text()) == (2, "mine")
        assert "--force" in err
        assert not fleet.asked
        assert run("--tokens", "16", "-o", "out.json", "--force")[0] == 0
        assert read_result_file(Path("out.json")).complete

    def test_no_file_is_made_where_nothing_was_measured(self, run: Run, fleet: FakeFleet) -> None:
        Path("out.json").write_text("mine")

        def fail(*_: object) -> None:
            fleet.current = None
            raise PeerLost("lost decode agent 0")

        fleet.during = fail
        code, _, err = run("--tokens", "16", "-o", "out.json", "--force")
        assert (code, Path("out.json").read_text()) == (1, "mine")
        assert "lost decode agent 0" in err

    @pytest.mark.parametrize(("failure", "code"), [(InputError("no UCX is installed"), 2), (PdtxError("stuck"), 1)])
    def test_a_run_without_a_sample_leaves_no_file_and_ends_as_its_error_does(
        self, run: Run, fleet: FakeFleet, failure: PdtxError, code: int
    ) -> None:
        def fail(_: FakeFleet, result: CaseResult) -> None:
            result.samples.clear()
            result.error, fleet.failure = str(failure), failure

        fleet.during = fail
        found, out, err = run("--tokens", "16", "-o", "out.json")
        assert found == code
        assert f"FAILED: {failure}" in out
        assert f"1 of 1 case failed; first: {failure}" in err
        assert "go on with" not in err
        assert not Path("out.json").exists()

    def test_files_have_names_of_their_own_by_default(self, run: Run) -> None:
        for _ in range(3):
            assert run("--tokens", "16")[0] == 0
        assert len(list(Path("results").glob("bench-*.json"))) == 3

    def test_a_file_that_another_run_has_made_meanwhile_is_kept(self, run: Run, fleet: FakeFleet) -> None:
        named = Path("results/out.json")

        def another(_: FakeFleet, result: CaseResult) -> None:
            if not named.exists():
                named.write_text("theirs")

        fleet.during = another
        code, _, err = run("--tokens", "16,32", "-o", str(named))
        assert (code, named.read_text()) == (0, "theirs")
        assert "result in results/out-2.json" in err
        assert len(read_result_file(Path("results/out-2.json")).cases) == 2

    def test_a_case_that_fails_is_told_and_the_others_go_on(self, run: Run, fleet: FakeFleet) -> None:
        def fail(_: FakeFleet, result: CaseResult) -> None:
            if result.case.tokens == 16:
                result.error = "iteration 3: delivered 1 of 5"

        fleet.during = fail
        code, out, err = run("--tokens", "16,32")
        assert code == 1
        assert "FAILED: iteration 3: delivered 1 of 5" in out
        assert err.endswith("pdtx: error: 1 of 2 cases failed; first: iteration 3: delivered 1 of 5\n")
        assert len(fleet.asked) == 2

    def test_wrong_elements_are_an_error(self, run: Run, fleet: FakeFleet) -> None:
        def spoil(_: FakeFleet, result: CaseResult) -> None:
            result.samples[4] = Sample(
                iteration=4, warmup=False, wall_s=0.002, links=result.samples[4].links, wrong=7, first_wrong="K token 3"
            )

        fleet.during = spoil
        code, out, err = run("--tokens", "16")
        assert code == 1
        assert "FAILED: 7 wrong elements; the first in iteration 4: K token 3" in out
        assert "7 elements are wrong, so figures beside them mean nothing; first: iteration 4: K token 3" in err

    @pytest.mark.parametrize(("ended", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
    def test_a_signal_leaves_what_there_is(self, run: Run, fleet: FakeFleet, ended: BaseException, code: int) -> None:
        def interrupt(_: FakeFleet, result: CaseResult) -> None:
            if result.case.tokens == 32:
                del result.samples[10:]
                raise ended

        fleet.during = interrupt
        found, out, err = run("--tokens", "16,32,64", "-o", "out.json")
        assert found == code
        result = read_result_file(Path("out.json"))
        assert not result.complete
        assert [(case.error, len(case.samples)) for case in result.cases] == [(None, 23), ("interrupted", 10)]
        assert "FAILED: interrupted" in out
        assert "incomplete result in out.json" in err

    def test_a_lost_agent_leaves_what_there_is(self, run: Run, fleet: FakeFleet) -> None:
        def lose(_: FakeFleet, result: CaseResult) -> None:
            result.error = "lost decode agent 0"
            raise PeerLost(result.error)

        fleet.during = lose
        code, _, err = run("--tokens", "16,32", "-o", "out.json")
        assert code == 1
        result = read_result_file(Path("out.json"))
        assert (result.complete, [case.error for case in result.cases]) == (False, ["lost decode agent 0"])
        assert "lost decode agent 0" in err

    def test_the_deadline_ends_the_run_with_what_there_is(
        self, run: Run, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def late(_: FakeFleet, result: CaseResult) -> None:
            after = time.monotonic() + 61
            monkeypatch.setattr(time, "monotonic", lambda: after)

        fleet.during = late
        code, _, err = run("--tokens", "16,32,64", "--deadline", "60", "-o", "out.json")
        assert code == 1
        assert "the deadline has passed with 2 of 3 cases left" in err
        assert "cut off before all cases were measured" in err
        result = read_result_file(Path("out.json"))
        assert (result.complete, len(result.cases)) == (False, 1)

    def test_a_case_that_the_deadline_cuts_off_is_no_complete_run(
        self, run: Run, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def late(_: FakeFleet, result: CaseResult) -> None:
            del result.samples[10:]
            result.error = "cut off by the deadline after 7 of 20 iterations"
            after = time.monotonic() + 61
            monkeypatch.setattr(time, "monotonic", lambda: after)

        fleet.during = late
        assert run("--tokens", "16", "--deadline", "60", "-o", "out.json")[0] == 1
        assert not read_result_file(Path("out.json")).complete

    def test_every_case_has_the_run_s_deadline(self, run: Run, fleet: FakeFleet) -> None:
        before = time.monotonic()
        run("--tokens", "16,32", "--deadline", "60")
        first, second = (asked["deadline"] for asked in fleet.asked)
        assert first == second
        assert before + 60 <= first <= time.monotonic() + 60


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def start(model: str, *arguments: str) -> subprocess.Popen[str]:
    flags = ["bench", "--model", model, "--local", "--reference", "none", *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "pdtx", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def children_of(pid: int) -> set[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return {int(child) for child in text.split()}


def test_a_run_on_this_machine(model: str, tmp_path: Path) -> None:
    """Both agents are started and ended, everything is verified, and bytes are those of the model."""
    output = tmp_path / "out.json"
    asked = ("--tokens", "40", "--op", "push,pull", "--block-size", "16:32", "--iterations", "3", "--warmup", "1")
    with start(model, *asked, "-o", str(output)) as process:
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert len(out.splitlines()) == 3 + 2
    result = read_result_file(output)
    assert result.complete
    assert [case.case.op for case in result.cases] == ["push", "pull"]
    for case in result.cases:
        assert [sample.warmup for sample in case.samples] == [True, False, False, False]
        assert [sample.wrong for sample in case.samples] == [0] * 4
        assert {link.received_bytes for sample in case.samples for link in sample.links} == {40 * TINY_TOKEN}
        assert case.links[0].path["kind"] == "tcp"
    assert [node.role for node in result.nodes] == ["prefill", "decode"]


def test_ctrl_c_leaves_a_file_and_no_process(model: str, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    slow = ("--layer-compute", "0,2s", "--tokens", "16", "--iterations", "3", "--warmup", "0")
    with start(model, *slow, "-o", str(output)) as process:
        assert process.stderr is not None
        for line in process.stderr:  # ends with the process
            if line.startswith("case 2 of 2"):
                break
        agents = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert len(agents) == 2
    assert not [agent for agent in agents if Path(f"/proc/{agent}").exists()]
    result = read_result_file(output)
    assert not result.complete
    # The signal may come just before the case has begun.
    assert [case.error for case in result.cases] in ([None, "interrupted"], [None])
    assert len(result.cases[0].samples) == 3


def test_an_agent_that_does_not_start_says_why(model: str) -> None:
    with start(model, "--device", "elephants") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode in (1, 2)
    assert "elephants" in err.splitlines()[-1]


def test_agents_share_the_machine_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    assert share_of_memory(4) == 200


def test_only_one_side_is_no_fleet() -> None:
    with pytest.raises(InputError, match="--decode alone"):
        agent_counts(Flags({"decode": "a:1"}))

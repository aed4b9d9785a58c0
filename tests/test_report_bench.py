"""Tables, CSV, traces, plots and pages of results, and the commands that make them."""

import csv
import io
import json
import re
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from typer.testing import Result as Ran

from pdtx.cli import app
from pdtx.errors import InputError
from pdtx.report.cases import case_table, constant_text, details, measured_rows, numbered, remarks, vllm_table
from pdtx.report.csv_export import cases_csv, samples_csv
from pdtx.report.tables import Table
from pdtx.report.trace import chrome_trace, computations, lanes
from pdtx.results import write_result_file
from pdtx.results.model import Case, NodeFacts, Result, Sample, Transfer
from pdtx.results.overlap import overlaps
from pdtx.results.summary import counted_samples
from pdtx.spans import union_seconds
from tests.synthetic_results import MIB, link_sample, recorded, result_of, sample, swept

OLD = Path(__file__).parent / "data" / "results"


@pytest.fixture
def layered() -> Result:
    return swept(links=2, compute_s=500e-6, tokens=(512, 2048), movers=("tcp",), layers=4, iterations=12, rate=2e10)


def moved(layer: int, ready: float, posted: float, ended: float, link: int = 0) -> Transfer:
    return Transfer(link, 0, 0, layer, layer + 1, 0, 0, MIB, ready, posted, posted, ended)


def pdtx(*words: object) -> Ran:
    return CliRunner().invoke(app, [str(word) for word in words])


def stored(tmp_path: Path, result: Result, name: str = "result.json") -> Path:
    write_result_file(tmp_path / name, result)
    return tmp_path / name


class TestTables:
    def test_markdown_escapes_what_would_end_a_cell(self) -> None:
        table = Table(("name", "n"), (("a|b", "1"),))
        assert table.markdown() == ["| name |   n |", "| ---- | --: |", "| a\\|b |   1 |"]
        assert table.text() == ["name  n", "a|b   1"]

    def test_no_rate_without_what_was_found_wrong(self) -> None:
        case = recorded([0.01] * 10, 64 * MIB)
        case.samples = [sample(one.iteration, one.links, wrong=None) for one in case.samples]
        table = case_table(measured_rows(result_of(case)))
        row = dict(zip(table.heads, table.rows[0], strict=True))
        assert row["GB/s whole"] == "6.711"
        assert row["#wrong"] == "unverified"
        gbits = case_table(measured_rows(result_of(case)), gbits=True)
        assert dict(zip(gbits.heads, gbits.rows[0], strict=True))["Gb/s whole"] == "53.687"

    def test_parameters_that_vary_have_columns(self) -> None:
        heads = case_table(measured_rows(swept())).heads
        assert "mover" in heads
        assert "layout" not in heads

    def test_a_cut_case_says_how_many_count(self) -> None:
        case = recorded([0.01] * 10, MIB)
        case.iterations = 20
        table = case_table(measured_rows(result_of(case)))
        assert dict(zip(table.heads, table.rows[0], strict=True))["N"] == "10 of 20"

    def test_remarks_that_are_alike_are_said_once(self) -> None:
        result = swept(tokens=(512, 2048), movers=("tcp",))
        assert remarks(result, measured_rows(result)) == ["cases 0 to 1: reference ucx_perftest missing: not installed"]
        assert [numbered(numbers) for numbers in ([3], [1, 2, 3], [1, 4])] == ["case 3", "cases 1 to 3", "cases 1, 4"]

    def test_what_all_cases_share_names_the_layers_and_what_is_unusual(self) -> None:
        plain, other = Case(), Case(layers=8, depth=2, mean_run=4, layers_per_transfer=0)
        told = constant_text([plain])
        assert "layers all" in told
        assert "depth" not in told
        assert "tokens" not in told
        told = constant_text([other, other])
        assert all(words in told for words in ("layers 8", "depth 2", "mean run 4", "layers per transfer all"))
        assert "layers" not in constant_text([plain, other])

    def test_thousands_are_set_apart(self) -> None:
        table = case_table(measured_rows(swept(tokens=(2048,), movers=("tcp",))))
        row = dict(zip(table.heads, table.rows[0], strict=True))
        assert (row["tokens"], row["runs"]) == ("2,048", "2,048")

    def test_vllm_names_have_vllm_units(self) -> None:
        table = vllm_table(measured_rows(result_of(recorded([0.010, 0.030], MIB))))
        row = dict(zip(table.heads, table.rows[0], strict=True))
        assert row["Avg xfer time (ms)"] == "20.000"
        assert row["Avg MB per transfer"] == "1.000"
        assert row["Throughput (MB/s)"] == "50.000"

    def test_details_name_every_unit_and_both_rates(self) -> None:
        text = "\n".join(details(measured_rows(swept(tokens=(512,), movers=("tcp",)))[0]))
        assert re.search(r"per rank +\S+ GB/s = \S+ GiB/s = \S+ Gb/s = \S+ MiB/s", text)
        assert re.search(r"whole +\S+ GB/s", text)
        assert "20 of 20 asked for, 2 to warm up" in text


class TestOverlap:
    def test_covered_counts_no_second_twice(self) -> None:
        assert union_seconds([(0, 2), (1, 3), (5, 6)]) == 4
        assert union_seconds([(0, 2), (1, 3), (5, 6)], until=2.5) == 2.5
        assert union_seconds([(0, 10), (1, 2)], until=4) == 4
        assert union_seconds([(0, 10), (1, 2), (3, 11)]) == 11

    def test_what_is_hidden_lies_before_the_last_layer_is_computed(self) -> None:
        case = Case(layer_compute_s=1.0)
        one = sample(0, [link_sample(2.0, MIB)], transfers=[moved(0, 1, 1, 1.5), moved(1, 2, 2, 3.5)])
        (found,) = overlaps(case, one)
        assert (found.hidden, found.moved, found.exposed, found.computed) == (0.5, 2.0, 1.5, 2.0)
        assert found.share == 0.25
        assert overlaps(Case(), one) == []


class TestTrace:
    def test_transfers_of_a_lane_do_not_overlap(self) -> None:
        transfers = [moved(0, 0, 0, 3), moved(1, 0, 1, 2), moved(2, 0, 2.5, 4), moved(3, 0, 3, 5)]
        assert [lane for lane, _ in lanes(transfers)] == [0, 1, 1, 0]

    def test_computations_end_when_their_layers_are_ready(self) -> None:
        case = recorded([0.01], MIB, case=Case(layer_compute_s=1.0))
        twice = [moved(0, 1, 1, 2), moved(1, 2, 2, 3), moved(1, 2, 2.5, 4)]
        assert [(begin, end) for begin, end, _ in computations(case, twice)] == [(0, 1), (1, 2)]

    def test_events_are_what_viewers_want(self, layered: Result) -> None:
        case = layered.cases[0]
        document = json.loads(json.dumps(chrome_trace(case, counted_samples(case)[:3])))
        ends = defaultdict[tuple[int, int], float](float)
        slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
        assert {event["cat"] for event in slices} == {"compute", "move"}
        assert {event["pid"] for event in slices} == {0, 1}
        for event in sorted(slices, key=lambda event: event["ts"]):
            place = (event["pid"], event["tid"])
            assert event["dur"] >= 0
            assert event["ts"] >= ends[place] - 1e-6
            ends[place] = event["ts"] + event["dur"]
        moves = [event for event in slices if event["cat"] == "move"]
        assert sum(event["args"]["bytes"] for event in moves) == 3 * 2 * case.links[0].wire_bytes


class TestCsv:
    def test_one_row_a_case(self) -> None:
        rows = list(csv.DictReader(io.StringIO(cases_csv(measured_rows(swept())))))
        assert len(rows) == 8
        assert {row["mover"] for row in rows} == {"tcp", "shm"}
        assert rows[0]["block_size"] == "16:16"
        assert float(rows[0]["whole_gb_per_s"]) * 8 == pytest.approx(float(rows[0]["whole_gbit_per_s"]))
        assert rows[0]["wrong_elements"] == "0"

    def test_one_row_a_sample_with_warm_ups(self, layered: Result) -> None:
        rows = list(csv.DictReader(io.StringIO(samples_csv(measured_rows(layered)))))
        assert len(rows) == 2 * (12 + 2) * 2
        assert sum(row["warmup"] == "1" for row in rows) == 2 * 2 * 2

    def test_a_sample_that_failed_is_in_it(self) -> None:
        case = recorded([0.01], MIB)
        case.samples.append(Sample(iteration=1, warmup=False, wall_s=0.0, links=[], error="lost, and gone"))
        rows = list(csv.DictReader(io.StringIO(samples_csv(measured_rows(result_of(case))))))
        assert [row["error"] for row in rows] == ["", "lost, and gone"]

    @pytest.mark.parametrize("start", "=+-@")
    def test_text_is_no_formula(self, start: str) -> None:
        case = recorded([0.01], MIB, case=Case(model=f"{start}cmd()", mean_run=-1.0))
        (row,) = csv.DictReader(io.StringIO(cases_csv(measured_rows(result_of(case)))))
        assert (row["model"], row["mean_run"]) == (f"'{start}cmd()", "-1.0")

    def test_nothing(self) -> None:
        assert cases_csv([]) == "case\n"


class TestPlots:
    @pytest.fixture(autouse=True)
    def _needs_matplotlib(self) -> None:
        pytest.importorskip("matplotlib", reason="plots need matplotlib (extra plot)")

    @pytest.mark.parametrize("kind", ["rate", "latency", "timeline", "overlap"])
    @pytest.mark.parametrize("ending", ["png", "svg"])
    def test_every_kind_is_drawn(self, tmp_path: Path, layered: Result, kind: str, ending: str) -> None:
        file, picture = stored(tmp_path, layered), tmp_path / f"picture.{ending}"
        assert pdtx("plot", file, "--kind", kind, "-o", picture).exit_code == 0
        assert picture.read_bytes().startswith(b"\x89PNG" if ending == "png" else b"<?xml")

    def test_a_rate_plot_has_the_medians_and_the_references(self) -> None:
        from pdtx.report.plots import draw_rate

        rows = measured_rows(swept(movers=("tcp",)))
        (axes,) = draw_rate(rows).axes
        drawn: dict[str, Any] = {line.get_label(): line for line in axes.lines if len(line.get_xdata()) == 4}
        rates = [row.summary.whole.gb_per_s for row in rows if row.summary.whole is not None]
        assert list(drawn["tcp"].get_ydata()) == pytest.approx(rates)
        assert list(drawn["tcp"].get_xdata()) == [row.summary.nbytes for row in rows]
        names = {text.get_text() for text in axes.texts}
        assert {"socket", "memcpy"} <= names
        assert any("layers 8, batch 1" in text and text.endswith("on 127.0.0.1") for text in names)
        legend = [text.get_text() for text in axes.get_legend().get_texts()]
        assert legend == ["tcp", "reference socket", "reference memcpy"]

    @pytest.mark.parametrize("slowest", [0.0101, 0.012, 0.02, 0.2, 30])
    def test_a_latency_plot_has_ticks_to_read_by(self, slowest: float) -> None:
        from pdtx.report.plots import draw_latency

        (axes,) = draw_latency(measured_rows(result_of(recorded([0.01] * 5 + [slowest], MIB)))).axes
        ticks = [text.get_text() for text in axes.get_xticklabels()]
        assert 4 <= len(ticks) <= 9
        assert len(set(ticks)) == len(ticks)
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["tokens 2,048"]

    def test_an_overlap_is_labelled_by_what_is_drawn(self) -> None:
        from pdtx.report.plots import draw_overlap

        case = recorded([2.0, 2.0, 2.0], MIB, case=Case(layer_compute_s=1.0))
        ended = (1.0, 1.5, 3.5)
        case.samples = [
            sample(number, one.links, transfers=[moved(0, 1, 0, end)])
            for number, (one, end) in enumerate(zip(case.samples, ended, strict=True))
        ]
        (axes,) = draw_overlap(measured_rows(result_of(case))).axes
        hidden, exposed = (next(iter(bars)).get_width() for bars in axes.containers[1:])
        assert (hidden, exposed) == (1000, 500)
        assert "67% hidden" in {text.get_text() for text in axes.texts}

    def test_cases_of_one_size_become_bars(self) -> None:
        from pdtx.report.plots import draw_rate

        (axes,) = draw_rate(measured_rows(swept(tokens=(512,)))).axes
        assert [text.get_text() for text in axes.get_yticklabels()] == ["mover tcp", "mover shm"]

    def test_what_cannot_be_drawn_is_said(self) -> None:
        from pdtx.report.plots import DRAWN

        rows = measured_rows(swept(tokens=(512,)))
        with pytest.raises(InputError, match="--layer-compute"):
            DRAWN["overlap"](rows)
        for kind in DRAWN:
            with pytest.raises(InputError):
                DRAWN[kind]([])

    def test_matplotlib_missing_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from pdtx.report.html import html_report

        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(InputError, match=re.escape("pip install 'pdtx[plot]'")):
            html_report(swept(tokens=(512,)), "x")

    @pytest.mark.parametrize("name", ["picture.bmp", "picture"])
    def test_another_ending_is_refused(self, tmp_path: Path, layered: Result, name: str) -> None:
        ran = pdtx("plot", stored(tmp_path, layered), "-o", tmp_path / name)
        assert isinstance(ran.exception, InputError)
        assert ".png, .svg, .pdf" in str(ran.exception)
        assert not (tmp_path / name).exists()


class _Page(HTMLParser):
    """What a page refers to, and whether its elements end."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.scripts = 0
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


class TestPage:
    @pytest.fixture(autouse=True)
    def _needs_matplotlib(self) -> None:
        pytest.importorskip("matplotlib", reason="plots need matplotlib (extra plot)")

    def page(self, tmp_path: Path, result: Result) -> str:
        assert pdtx("report", stored(tmp_path, result), "-o", tmp_path / "page.html").exit_code == 0
        return (tmp_path / "page.html").read_text()

    def test_it_fetches_nothing_and_runs_nothing(self, tmp_path: Path, layered: Result) -> None:
        text = self.page(tmp_path, layered)
        page = _Page()
        page.feed(text)
        assert page.scripts == 0
        assert all(one.startswith(("#", "data:image/png;base64,")) for one in page.references)
        assert "url(http" not in text
        assert "default-src 'none'" in text
        assert text.count("<svg") == 4

    def test_findings_and_missing_plots_are_told(self, tmp_path: Path) -> None:
        result = swept(tokens=(512, 2048), movers=("tcp",), iterations=5)
        text = self.page(tmp_path, result)
        assert "only 5 iterations count" in text
        assert "no case computes while it moves" in text

    def test_words_of_others_stay_words(self, tmp_path: Path) -> None:
        case = recorded([0.01] * 10, MIB, case=Case(mover_options={"a": "<script>alert(1)</script>"}))
        case.samples[2] = sample(2, case.samples[2].links, wrong=1, first_wrong="<img src=x onerror=y>")
        result = result_of(case, label="<b>bold</b>", config={"<i>": "</pre>"}, command=["pdtx", "</pre><script>"])
        text = self.page(tmp_path, result)
        page = _Page()
        page.feed(text)
        assert page.scripts == 0
        assert "<img" not in text
        assert "<b>bold" not in text
        assert "<i>" not in text

    def test_an_old_result_has_a_page(self, tmp_path: Path) -> None:
        assert pdtx("report", OLD / "version_1_demo.json", "-o", tmp_path / "old.html").exit_code == 0


class TestCommands:
    def test_show(self, tmp_path: Path, layered: Result) -> None:
        file = stored(tmp_path, layered)
        shown = pdtx("show", file)
        assert shown.exit_code == 0
        assert "# command  pdtx bench --local" in shown.stdout
        assert "#wrong" in pdtx("show", file, "--style", "vllm").stdout
        assert pdtx("show", file, "--markdown").stdout.startswith("| case |")
        assert "GiB/s" in pdtx("show", file, "--details").stdout
        document = json.loads(pdtx("show", file, "--json").stdout)
        assert document["cases"][0]["summary"]["move"]["count"] == 24
        assert document["cases"][0]["summary"]["verdict"] == "0"

    @pytest.mark.parametrize("name", ["version_1_demo.json", "version_1_prefill.json", "version_2.json"])
    def test_old_versions_are_shown(self, name: str) -> None:
        assert pdtx("show", OLD / name).exit_code == 0

    def test_check_exits_with_1_where_something_is_found(self, tmp_path: Path) -> None:
        stable = pdtx("check", stored(tmp_path, swept(tokens=(512,)), "stable.json"))
        assert (stable.exit_code, stable.stdout) == (0, "stable: nothing was found in 2 cases\n")
        unstable = stored(tmp_path, result_of(recorded([0.01] * 4, MIB)), "unstable.json")
        ran = pdtx("check", unstable)
        assert ran.exit_code == 1
        assert ran.stdout == "case 0: only 4 iterations count; measure 10 or more with --iterations\n"
        assert json.loads(pdtx("check", unstable, "--json").stdout)["findings"][0]["code"] == "few"

    def test_compare_fails_above_a_limit_and_not_below(self, tmp_path: Path) -> None:
        pytest.importorskip("scipy", reason="comparing needs scipy (extra plot)")
        results = (swept(movers=("tcp",)), swept(movers=("tcp",), rate=2e9, seed=2))
        fast, slow = (stored(tmp_path, one, f"{n}.json") for n, one in enumerate(results))
        told = pdtx("compare", fast, slow)
        assert told.exit_code == 0
        assert re.search(r"1\.[45]\dx slower \(95% CI 1\.\d\d to 1\.\d\d\)", told.stdout)
        assert pdtx("compare", fast, slow, "--fail-above", "5%").exit_code == 1
        assert pdtx("compare", fast, slow, "--fail-above", "0.9").exit_code == 0
        assert pdtx("compare", slow, fast, "--fail-above", "5%").exit_code == 0
        assert pdtx("compare", fast, fast, "--fail-above", "0%").exit_code == 0
        assert json.loads(pdtx("compare", fast, slow, "--json").stdout)["cases"][0]["verdict"] == "slower"

    def test_compare_fails_where_the_second_has_failed(self, tmp_path: Path) -> None:
        pytest.importorskip("scipy", reason="comparing needs scipy (extra plot)")
        good, bad = recorded([0.01] * 10, MIB), recorded([0.005] * 10, MIB)
        bad.samples[4] = sample(4, bad.samples[4].links, wrong=1)
        files = [stored(tmp_path, result_of(case), f"{n}.json") for n, case in enumerate((good, bad))]
        ran = pdtx("compare", *files, "--fail-above", "5%")
        assert ran.exit_code == 1
        assert "no comparison: failed" in ran.stdout

    @pytest.mark.parametrize("what", ["missing", "few", "unverified", "zero", "skipped", "failed before"])
    def test_compare_does_not_pass_what_has_shown_nothing(self, tmp_path: Path, what: str) -> None:
        pytest.importorskip("scipy", reason="comparing needs scipy (extra plot)")
        before, after = swept(movers=("tcp",), tokens=(512, 2048)), swept(movers=("tcp",), tokens=(512, 2048))
        case = after.cases[1]
        if what == "missing":
            del after.cases[1]
        elif what == "few":
            case.samples, case.iterations = case.samples[:6], 4
        elif what == "unverified":
            case.samples = [sample(n, one.links, warmup=n < 2, wrong=None) for n, one in enumerate(case.samples)]
        elif what == "zero":
            nbytes = case.links[0].wire_bytes
            case.samples[5] = sample(5, [link_sample(0.0, nbytes)])
        elif what == "skipped":
            case.skipped, case.samples = "no such mover here", []
        else:
            before.cases[1].error = "lost"
        files = stored(tmp_path, before, "a.json"), stored(tmp_path, after, "b.json")
        assert pdtx("compare", *files).exit_code == 0
        ran = pdtx("compare", *files, "--fail-above", "5%")
        assert ran.exit_code == 1
        assert "tokens 2,048" in ran.stderr
        assert "has not shown that it is as fast" in ran.stderr
        assert "tokens 512" not in ran.stderr
        assert len(json.loads(pdtx("compare", *files, "--fail-above", "5%", "--json").stdout)["unproven"]) == 1

    def test_compare_tells_what_all_cases_share_and_who_was_busy(self, tmp_path: Path) -> None:
        pytest.importorskip("scipy", reason="comparing needs scipy (extra plot)")
        steady, busy = recorded([0.01] * 12, MIB), recorded([0.02] * 12, MIB)
        busy.load_average = [6.5, 6.5]
        files = [stored(tmp_path, result_of(case), f"{n}.json") for n, case in enumerate((steady, busy))]
        told = pdtx("compare", *files).stdout
        assert "all: model llama-3-8b, kv cache dtype auto, layers all, " in told
        assert (
            f"unsteady: B: 127.0.0.1 had a load of 6.5 on 8 CPUs before the first iteration; see pdtx check {files[1]}"
            in told
        )
        assert re.search(r"2\.00x slower \(.*\); load in B", told)

    def test_words_of_others_do_not_steer_the_terminal(self, tmp_path: Path) -> None:
        pytest.importorskip("scipy", reason="comparing needs scipy (extra plot)")
        evil = "\x1b[2J\u202e\u2066x\x9b\rstable\nstable"
        case = recorded([0.01] * 10, MIB, case=Case(model=evil, mover=evil))
        case.load_average, case.error = [9.0, 9.0], evil
        nodes = [NodeFacts(role=one.role, host=evil, rank=0, facts=one.facts) for one in result_of().nodes]
        one, other = (
            stored(tmp_path, result_of(case, label=label, nodes=nodes), f"{n}.json")
            for n, label in enumerate((evil, ""))
        )
        for words in (
            ("show", one), ("show", one, "--details"), ("show", one, "--markdown"), ("check", one),
            ("compare", one, other, "--fail-above", "5%"), ("compare", one, other, "--markdown"),
        ):  # fmt: skip
            ran = pdtx(*words)
            assert "[2J" in ran.stdout
            assert (ran.stdout + ran.stderr).replace("\n", "").isprintable()
            assert "stable" not in (ran.stdout + ran.stderr).splitlines()

    def test_check_is_not_stable_where_nothing_was_measured(self, tmp_path: Path) -> None:
        ran = pdtx("check", stored(tmp_path, result_of()))
        assert ran.exit_code == 1
        assert ran.stdout.startswith("the run: nothing was measured: there are no cases; ")

    def test_plot_draws_one_file(self, tmp_path: Path, layered: Result) -> None:
        file = stored(tmp_path, layered)
        assert f"pdtx compare {file} {file}" in str(pdtx("plot", file, file).exception)

    @pytest.mark.parametrize("text", ["five", "-1%", "nan", "inf", ""])
    def test_a_limit_that_is_none(self, tmp_path: Path, text: str) -> None:
        file = stored(tmp_path, swept(tokens=(512,)))
        assert isinstance(pdtx("compare", file, file, f"--fail-above={text}").exception, InputError)

    def test_scipy_missing_is_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "scipy.stats", None)
        file = stored(tmp_path, swept(tokens=(512,)))
        assert "pip install 'pdtx[plot]'" in str(pdtx("compare", file, file).exception)

    def test_export(self, tmp_path: Path, layered: Result) -> None:
        file = stored(tmp_path, layered)
        assert len(pdtx("export", file, "--csv").stdout.splitlines()) == 3
        assert pdtx("export", file, "--csv", "--samples", "-o", tmp_path / "samples.csv").exit_code == 0
        assert len((tmp_path / "samples.csv").read_text().splitlines()) == 1 + 56
        assert "--csv" in str(pdtx("export", file).exception)

    def test_a_trace_is_written(self, tmp_path: Path, layered: Result) -> None:
        file = stored(tmp_path, layered)
        assert pdtx("plot", file, "--kind", "trace", "--case", 1, "-o", tmp_path / "trace.json").exit_code == 0
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert "there is no case 7" in str(pdtx("plot", file, "--case", 7).exception)
        assert "no transfers are known" in str(
            pdtx("plot", OLD / "version_1_demo.json", "--kind", "trace", "-o", tmp_path / "none.json").exception
        )

    @pytest.mark.parametrize("command", ["export", "plot", "report"])
    def test_nothing_is_overwritten_unasked(self, tmp_path: Path, layered: Result, command: str) -> None:
        file, taken = stored(tmp_path, layered), tmp_path / "taken.svg"
        taken.write_text("precious")
        words = [command, file, "-o", taken, *(["--csv"] if command == "export" else [])]
        assert "--force" in str(pdtx(*words).exception)
        assert taken.read_text() == "precious"
        assert pdtx(*words, "--force").exit_code == 0
        assert taken.read_text() != "precious"

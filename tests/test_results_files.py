"""Result files: written whole, read strictly, old versions too."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from pdtx.errors import InputError
from pdtx.results import CaseSummary, read_result_file, summarize, write_result_file, write_whole
from pdtx.results import files as files_module
from pdtx.results.model import CaseResult, Result
from tests.synthetic_results import result_of, swept

OLD = Path(__file__).parent / "data" / "results"


@pytest.fixture
def result() -> Result:
    return swept(tokens=(512, 2048), movers=("tcp",), iterations=3)


def changed(tmp_path: Path, result: Result, **fields: object) -> Path:
    """A file of the result with some fields of the document changed."""
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**msgspec.to_builtins(result), **fields}))
    return path


def _no_links(*_: object) -> None:
    raise PermissionError("no hard links here")


class TestWriting:
    def test_what_is_written_is_read_again(self, tmp_path: Path, result: Result) -> None:
        path = tmp_path / "new" / "result.json"
        write_result_file(path, result)
        assert read_result_file(path) == result
        assert [one.name for one in path.parent.iterdir()] == ["result.json"]

    def test_figures_are_written_in_every_unit_and_not_believed(self, tmp_path: Path, result: Result) -> None:
        path = tmp_path / "result.json"
        write_result_file(path, result)
        document = json.loads(path.read_text())
        figures, found = document["cases"][0]["figures"], summarize(result.cases[0])
        assert found.whole is not None
        assert found.move is not None
        assert figures["whole"]["gib_per_s"] == found.whole.gib_per_s
        assert figures["whole"]["gbit_per_s"] == found.whole.gbit_per_s
        assert (figures["move"]["p99"], figures["wrong"], figures["count"]) == (found.move.p99, 0, 3)
        document["cases"][0]["figures"] = {"whole": {"gb_per_s": 1e9}}
        path.write_text(json.dumps(document))
        assert read_result_file(path) == result

    def test_a_file_that_is_there_is_not_overwritten_unasked(self, tmp_path: Path, result: Result) -> None:
        path = tmp_path / "result.json"
        path.write_text("precious")
        with pytest.raises(InputError, match="exists; give another name, or --force"):
            write_result_file(path, result)
        assert path.read_text() == "precious"
        write_result_file(path, result, force=True)
        assert read_result_file(path) == result

    @pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
    def test_a_file_that_appears_while_another_is_written_is_kept(
        self, tmp_path: Path, result: Result, monkeypatch: pytest.MonkeyPatch, links: bool
    ) -> None:
        path = tmp_path / "result.json"

        def meanwhile(case: CaseResult) -> CaseSummary:
            path.write_text("precious")
            return summarize(case)

        monkeypatch.setattr(files_module, "summarize", meanwhile)
        if not links:
            monkeypatch.setattr(os, "link", _no_links)
        with pytest.raises(InputError, match="exists; give another name, or --force"):
            write_result_file(path, result)
        assert path.read_text() == "precious"
        assert write_result_file(path, result, numbered=True) == tmp_path / "result-2.json"
        assert read_result_file(tmp_path / "result-2.json") == result
        assert {one.name for one in tmp_path.iterdir()} == {"result.json", "result-2.json"}

    def test_what_cannot_be_put_in_place_leaves_nothing_behind(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(InputError, match="cannot write"):
            write_whole(tmp_path / "folder", b"x")
        assert [one.name for one in tmp_path.iterdir()] == ["folder"]


class TestReading:
    def test_a_newer_version_is_told_as_such(self, tmp_path: Path, result: Result) -> None:
        path = changed(tmp_path, result, version=3, cases="of another kind")
        with pytest.raises(
            InputError, match=r"made by a newer pdtx \(version 3 of the format; this one reads up to 2\)"
        ):
            read_result_file(path)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "no result of pdtx"),
            (b"\xff\xfe", "no result of pdtx"),
            (b"[1, 2]", "no result of pdtx"),
            (b"[" * 100_000, "no result of pdtx"),
            (b'{"version": 1, "rates": null}', "JSON, but no result"),
            (b'{"version": 2, "format": "other"}', "its format is 'other'"),
            (b'{"version": 1, "format": "pdtx-bench"}', "its format had no version 1"),
            (b'{"version": 2, "format": "pdtx-bench"}', "damaged, or was changed by hand"),
            (b'{"version": 1, "requests": [{"prompt_tokens": 3}]}', "damaged, or was changed by hand"),
        ],
    )
    def test_what_is_no_result_is_refused_in_one_line(self, tmp_path: Path, content: bytes, words: str) -> None:
        path = tmp_path / "file.json"
        path.write_bytes(content)
        with pytest.raises(InputError, match=words) as caught:
            read_result_file(path)
        assert "\n" not in str(caught.value)

    def test_a_parameter_that_is_not_known_is_refused(self, tmp_path: Path, result: Result) -> None:
        cases = msgspec.to_builtins(result.cases)
        cases[0]["case"]["colour"] = "green"
        with pytest.raises(InputError, match="colour"):
            read_result_file(changed(tmp_path, result, cases=cases))

    @pytest.mark.parametrize("size", ["many", "1" * 20, "1" * 5000, "\N{ARABIC-INDIC DIGIT FIVE}", ""])
    def test_run_sizes_are_sizes(self, tmp_path: Path, result: Result, size: str) -> None:
        cases = msgspec.to_builtins(result.cases)
        cases[1]["links"][0]["run_sizes"] = {size: 3}
        with pytest.raises(InputError, match="case 1 has a run_sizes without a size"):
            read_result_file(changed(tmp_path, result, cases=cases))

    @pytest.mark.parametrize(
        ("part", "field", "value"),
        [
            ("links", "move_s", -0.5), ("links", "prepare_s", -1e-9), ("links", "post_s", -1), ("links", "link", -1),
            ("links", "received_bytes", -1), ("links", "link", 1), ("transfers", 0, 1), (None, "wall_s", -0.1),
            (None, "wrong", -3), (None, "iteration", 1),
        ],
    )  # fmt: skip
    def test_impossible_numbers_are_refused(
        self, tmp_path: Path, result: Result, part: str | None, field: str | int, value: float
    ) -> None:
        cases = msgspec.to_builtins(result.cases)
        one = cases[1]["samples"][2]
        (one if part is None else one[part][0])[field] = value
        with pytest.raises(InputError, match=f"case 1.* iteration {1 if field == 'iteration' else 2}") as caught:
            read_result_file(changed(tmp_path, result, cases=cases))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("part", "field", "value", "words"),
        [
            ("references", "seconds", [0.1, 0.0], "case 0: .*references"),
            ("links", "decode", 2, "case 0 has a link from node 0 to node 2 of 2 nodes"),
            ("links", "prefill", -1, "case 0: "),
            ("registrations", "node", 2, "case 0 has a registration of a node that is none of 2"),
        ],
    )
    def test_impossible_parts_of_a_case_are_refused(
        self, tmp_path: Path, result: Result, part: str, field: str, value: object, words: str
    ) -> None:
        cases = msgspec.to_builtins(result.cases)
        cases[0][part][0][field] = value
        with pytest.raises(InputError, match=words):
            read_result_file(changed(tmp_path, result, cases=cases))

    def test_a_link_twice_in_an_iteration(self, tmp_path: Path, result: Result) -> None:
        cases = msgspec.to_builtins(result.cases)
        cases[0]["samples"][1]["links"] *= 2
        with pytest.raises(InputError, match="case 0 has a link twice in iteration 1"):
            read_result_file(changed(tmp_path, result, cases=cases))

    def test_impossible_rows_of_version_1_are_refused(self, tmp_path: Path) -> None:
        document = json.loads((OLD / "version_1_demo.json").read_text())
        document["requests"][0]["move_s"] = -1
        (tmp_path / "old.json").write_text(json.dumps(document))
        with pytest.raises(InputError, match="requests"):
            read_result_file(tmp_path / "old.json")

    def test_what_a_message_quotes_steers_no_terminal(self, tmp_path: Path, result: Result) -> None:
        cases = msgspec.to_builtins(result.cases)
        cases[0]["case"]["\x1b[31m\u202e"] = 1
        with pytest.raises(InputError, match="unknown field") as caught:
            read_result_file(changed(tmp_path, result, cases=cases))
        assert str(caught.value).isprintable()

    def test_other_files_of_pdtx_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "replay.json").write_text('{"format": "pdtx-replay", "version": 1}')
        with pytest.raises(InputError, match="pdtx replay has written it"):
            read_result_file(tmp_path / "replay.json")

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="No such file"):
            read_result_file(tmp_path / "absent.json")

    def test_too_much_is_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files_module, "MOST_BYTES", 10)
        (tmp_path / "big.json").write_bytes(b" " * 11)
        with pytest.raises(InputError, match="is this a result"):
            read_result_file(tmp_path / "big.json")


class TestOldVersions:
    def test_a_result_of_version_2(self) -> None:
        """Made when version 2 was new; what is added to the format needs a default."""
        result = read_result_file(OLD / "version_2.json")
        summary = summarize(result.cases[0])
        assert (summary.count, summary.verdict, summary.transport) == (4, "0", "tcp")
        assert result.nodes[1].role == "decode"

    def test_a_demo_of_version_1(self) -> None:
        result = read_result_file(OLD / "version_1_demo.json")
        assert result.version == 1
        document = json.loads((OLD / "version_1_demo.json").read_text())
        read = [(case.case.tokens, one.links[0].received_bytes) for case in result.cases for one in case.samples]
        assert sorted(read) == sorted((row["prompt_tokens"], row["nbytes"]) for row in document["requests"])
        assert len({tokens for tokens, _ in read}) == len(result.cases)
        case = result.cases[0]
        assert case.verified
        assert case.case.block_size == (16, 32)
        assert case.case.layout == ("flash_attn_nhd", "flashinfer_hnd")
        assert [(one.node, one.nbytes) for one in case.registrations] == [(1, 4096)]
        assert summarize(case).verdict == "0"
        assert summarize(case).ok

    def test_a_prefill_node_of_version_1(self) -> None:
        case, refused = read_result_file(OLD / "version_1_prefill.json").cases
        summary = summarize(case)
        assert case.case.block_size == (16, 16)
        assert not case.verified
        assert summary.verdict == "unverified"
        assert summary.transport == "tcp over shm"
        assert (summary.registered_bytes, summary.registration_s) == (1 << 20, 0.002)
        assert summary.failures == ()
        assert summarize(refused).failures == ("iteration 0: refused", "0 of 1 iterations were measured")

    def test_version_1_is_written_as_version_2(self, tmp_path: Path) -> None:
        old = read_result_file(OLD / "version_1_demo.json")
        write_result_file(tmp_path / "new.json", old)
        new = read_result_file(tmp_path / "new.json")
        assert new.version == 2
        assert new.cases == old.cases


def test_a_run_without_cases(tmp_path: Path) -> None:
    write_result_file(tmp_path / "none.json", result_of())
    assert read_result_file(tmp_path / "none.json").cases == []

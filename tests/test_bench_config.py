"""Flags out of YAML files: what is read as which text, and what is refused."""

from pathlib import Path

import pytest

from pdtx.bench.config import dump_config, read_config, scenario_names
from pdtx.bench.sweep import AXES
from pdtx.errors import InputError

FLAGS = [*AXES, "mover-option", "verify", "iterations", "warmup"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def read(config: Path, text: str) -> dict[str, str | list[str]]:
    config.write_text(text)
    return read_config(str(config), FLAGS, {"mover-option"})


def test_values_are_texts_as_on_a_command_line(config: Path) -> None:
    """YAML 1.1 would make 992 of 16:32, true of on, and 8 of 010."""
    text = "block-size: 16:32\nmerge: [on, off]\ntokens: [512, 010]\nverify: off\nlayer_compute: 500us\n"
    assert read(config, text) == {
        "block-size": "16:32",
        "merge": "on,off",
        "tokens": "512,010",
        "verify": "off",
        "layer-compute": "500us",
    }


@pytest.mark.parametrize("text", ["mover-option: {streams: 4}", "mover-option: [streams=4]", "mover_option: streams=4"])
def test_repeated_flags_stay_lists(config: Path, text: str) -> None:
    assert read(config, text) == {"mover-option": ["streams=4"]}


def test_an_empty_file_says_nothing(config: Path) -> None:
    assert read(config, "# nothing\n") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokens: 5\nblok_size: 16", "line 2: no flag 'blok_size'; the nearest is block-size"),
        ("xyzzy: 5", "no flag 'xyzzy'; see --help"),
        ("? [a]\n: 5", "no flag ''"),
        ("tokens: 5\ntokens: 6", "line 2: tokens is given twice"),
        ("block_size: 5\nblock-size: 6", "block-size is given twice"),
        ("tokens:", "tokens has no value"),
        ("tokens: []", "tokens has an empty list"),
        ("tokens: [[1]]", "tokens takes a value or a list of values, nothing deeper"),
        ("tokens: {a: 1}", "tokens takes a value or a list of values"),
        ("- 1", "must have keys"),
        ("tokens: [1", "is no YAML in line 1"),
        ("a: b: c", "is no YAML"),
        ("[" * 5000, "is no YAML"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(config: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        read(config, text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_is_made_of_what_a_file_asks_for(config: Path, tmp_path: Path) -> None:
    """A tag is no call: the text behind it is a text."""
    touched = tmp_path / "touched"
    assert read(config, f"model: !!python/object/apply:pathlib.Path.touch [{touched}]") == {"model": str(touched)}
    assert not touched.exists()


def test_files_that_are_none(config: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file, and scenarios are fragmentation, "):
        read_config("nowhere.yaml", FLAGS)
    with pytest.raises(InputError, match="cannot read the config"):
        read_config(str(tmp_path), FLAGS)
    config.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_config(str(config), FLAGS)
    config.write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(InputError, match="more than 1,048,576 bytes"):
        read_config(str(config), FLAGS)


def test_what_is_dumped_is_read_again(config: Path) -> None:
    values = {"block-size": ["16", "16:32"], "merge": "on", "tokens": "512", "verify": True, "mover-option": ["a=1"]}
    assert read(config, dump_config(values)) == {
        "block-size": "16,16:32",
        "merge": "on",
        "tokens": "512",
        "verify": "true",
        "mover-option": ["a=1"],
    }


@pytest.mark.parametrize("name", scenario_names())
def test_scenarios_have_flags_that_there_are(name: str) -> None:
    assert read_config(name, FLAGS)


def test_scenarios_are_those_that_help_names() -> None:
    assert set(scenario_names()) == {"quick", "sizes", "layouts", "fragmentation", "overlap"}

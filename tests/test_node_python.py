"""Nodes started from plain Python: the examples of docs/nodes.md, two processes, and what is left when they end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from pdtx.engine import KVConsumer
from pdtx.errors import AddressInUse, InputError, PdtxError, PeerUnreachable, TierError
from pdtx.node import (
    CacheConfig,
    CaptureConfig,
    DecodeConfig,
    DecodeNode,
    ModelConfig,
    PrefillConfig,
    PrefillNode,
    Prompt,
    TierConfig,
    TransportConfig,
)
from pdtx.serving import Job
from pdtx.tiers.prefix import Fetched, PrefixCache
from tests.engine_pair import wait_until
from tests.node_process import run
from tests.ports import free_port
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.timeout(240)

SHAPES = ModelConfig(synthetic="llama-3-8b", layers=2)
TOKEN_BYTES = 2 * 2 * 8 * 128 * 2
"""Of a token of SHAPES: layers, K and V, heads, channels, bytes each."""

DOCS = Path(__file__).parents[1] / "docs" / "nodes.md"


def decode_config(**changes: Any) -> DecodeConfig:  # noqa: ANN401
    given: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "verify": True,
        "model": SHAPES,
        "cache": CacheConfig("flashinfer_hnd", 32, 33),
    }
    return DecodeConfig(**(given | changes))


def prefill_config(address: str, **changes: Any) -> PrefillConfig:  # noqa: ANN401
    given: dict[str, Any] = {"model": SHAPES, "cache": CacheConfig("flash_attn_nhd", 16, 65), "prefill_rate": 1e6}
    return PrefillConfig(address, **(given | changes))


@contextmanager
def served(node: DecodeNode) -> Iterator[None]:
    """Serve on a thread; what the thread raises is raised here."""
    raised = list[BaseException]()

    def run() -> None:
        try:
            node.run()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        node.stop()
        thread.join(60.0)
    assert not thread.is_alive()
    assert not raised


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No thread and no descriptor more than before. The first nodes of a process open what stays open for all."""
    with DecodeNode(decode_config()) as node, served(node), PrefillNode(prefill_config(node.address)) as prefill:
        prefill.run([Prompt(token_ids=[1])])
    before = open_things()
    yield
    wait_until(lambda: all(now <= then for now, then in zip(open_things(), before, strict=True)), "nothing left open")


def open_things() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def program(text: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


def end_of(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_the_example_of_one_program_prints_what_the_page_says() -> None:
    printed = DOCS.read_text().split("```\np0 ")[1].split("```")[0]
    assert end_of(program(examples()[0])) == f"p0 {printed}"


def test_the_example_of_two_programs() -> None:
    _, decode, prefill = (
        text.replace("127.0.0.1:5600", f"127.0.0.1:{port}") for port in [free_port()] for text in examples()
    )
    with program(decode) as receiver:
        try:
            assert receiver.stdout is not None
            assert receiver.stdout.readline().startswith("listening on 127.0.0.1:")
            assert end_of(program(prefill)) == "tcp [True, True]\n"
            assert end_of(receiver) == "2 requests, 0 failed\n"
        finally:
            receiver.kill()


_DECODE = dedent("""
    import json, sys
    from pathlib import Path
    from pdtx.node import *
    node = DecodeNode(DecodeConfig(
        listen="127.0.0.1:0", verify=True, requests=3, model=ModelConfig(sys.argv[1], "float32", threads=1),
        cache=CacheConfig("flashinfer_hnd", 32, 64),
    ))
    with node:
        print(node.address, flush=True)
        served = node.run()
    print(json.dumps([served.requests, served.failed, sorted({"typer", "rich"} & set(sys.modules))]))
""")
_PREFILL = dedent("""
    import json, sys
    from pdtx.node import *
    config = PrefillConfig(
        sys.argv[2], max_tokens=8, ignore_eos=True, chunk_size=20, model=ModelConfig(sys.argv[1], "float32", threads=1),
        cache=CacheConfig("flash_attn_nhd", 16, 64),
    )
    with PrefillNode(config) as node:
        rows = node.run([Prompt(token_ids=list(range(n))) for n in (1, 33)] + ["some text"])
    found = [[row.request_id, row.token_ids, row.wrong, row.error, row.nbytes] for row in rows]
    print(json.dumps([found, sorted({"typer", "rich"} & set(sys.modules))]))
""")


def test_two_processes_with_a_model_know_nothing_of_a_command_line(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": list(range(n))}) for n in (1, 33)) + "\nsome text\n")
    same = ["--dtype", "float32", "--threads", "1", "--max-tokens", "8", "--ignore-eos", "--chunk-size", "20", "--json"]
    alone = run("pdtx", "generate", "--model", model, "--prompts", prompts, *same)
    assert alone.code == 0, alone.stderr
    expected = {name: row["token_ids"] for name, row in alone.requests.items()}
    command = [sys.executable, "-c"]
    with subprocess.Popen([*command, _DECODE, model], stdout=subprocess.PIPE, text=True) as decode:
        try:
            assert decode.stdout is not None
            address = decode.stdout.readline().strip()
            done = subprocess.run(
                [*command, _PREFILL, model, address], capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, done.stderr
            rows, imported = json.loads(done.stdout)
            assert imported == []
            assert {name: tokens for name, tokens, *_ in rows} == expected
            assert {(wrong, error) for _, _, wrong, error, _ in rows} == {(0, None)}
            assert [nbytes for *_, nbytes in rows][:2] == [n * 3 * 2 * 2 * 16 * 4 for n in (1, 33)]
            assert json.loads(decode.communicate(timeout=60)[0]) == [3, 0, []]
        finally:
            decode.kill()


@pytest.mark.usefixtures("nothing_left")
def test_two_threads_and_nothing_is_left() -> None:
    ended = list[str]()
    notes = list[str]()
    decode = DecodeNode(decode_config(), on_note=notes.append)
    with decode, served(decode):
        sender = prefill_config(decode.address)
        with PrefillNode(sender, on_note=notes.append) as prefill:
            jobs: list[Prompt | Job] = [
                Prompt(token_ids=[7] * 40),
                Job("mine", [1] * 33),
                Prompt(id="named", token_ids=[2]),
            ]
            rows = prefill.run(jobs, on_end=lambda one: ended.append(one.row.request_id))
            again = prefill.run([Prompt(token_ids=[3])])
            document = prefill.document(rows, ["a", "b"])
    assert [(row.request_id, row.nbytes, row.wrong, row.error) for row in rows] == [
        ("p0", 40 * TOKEN_BYTES, 0, None),
        ("mine", 33 * TOKEN_BYTES, 0, None),
        ("named", TOKEN_BYTES, 0, None),
    ]
    assert sorted(ended) == ["mine", "named", "p0"]
    assert [row.request_id for row in again] == ["p3"]
    assert (document["command"], document["model"]["dtype"], len(document["requests"])) == (["a", "b"], "bfloat16", 3)
    assert f"listening on {decode.address}" in notes[0]
    assert "the payload goes over tcp" in notes[1]
    assert notes[-1].endswith("served 4 requests, 0 of them failed")


def test_tiers_and_a_capture(tmp_path: Path) -> None:
    tiers = TierConfig(kv_offloading_size=1 / 64)
    with DecodeNode(decode_config()) as decode, served(decode):
        config = prefill_config(decode.address, tiers=tiers, capture=CaptureConfig(tmp_path / "captured"))
        with PrefillNode(config) as prefill:
            first = prefill.run([Prompt(token_ids=[5] * 64)])
            second = prefill.run([Prompt(token_ids=[5] * 64 + [6])])
            document = prefill.document(first + second)
    assert (first[0].cached_tokens, second[0].cached_tokens, second[0].cached_from) == (0, 64, "cpu")
    assert (first[0].wrong, second[0].wrong) == (0, 0)
    assert [usage["name"] for usage in document["tiers"]] == ["cpu"]
    assert len((tmp_path / "captured").read_text().splitlines()) == 3


def test_a_capture_counts_time_from_the_first_run(tmp_path: Path) -> None:
    with DecodeNode(decode_config()) as decode, served(decode):
        capture = CaptureConfig(tmp_path / "captured")
        with PrefillNode(prefill_config(decode.address, capture=capture, prefill_rate=640.0)) as prefill:
            prefill.run([Prompt(token_ids=[5] * 64)])  # 0.1 s
            prefill.run([Prompt(token_ids=[6])])
    _, first, second = map(json.loads, (tmp_path / "captured").read_text().splitlines())
    assert second["timestamp"] >= first["timestamp"] + 100


def test_what_a_prefill_node_loaded_is_kept_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, keep = list[int](), PrefixCache.keep

    def keeps(prefix: PrefixCache, *args: Any, fetched: Fetched | None = None, **options: Any) -> Any:  # noqa: ANN401
        loaded.append(fetched.num_tokens if fetched is not None else 0)
        return keep(prefix, *args, fetched=fetched, **options)

    monkeypatch.setattr(PrefixCache, "keep", keeps)
    with DecodeNode(decode_config()) as decode, served(decode):
        config = prefill_config(decode.address, tiers=TierConfig(kv_offloading_size=1 / 64))
        with PrefillNode(config) as prefill:
            prefill.run([Prompt(token_ids=[5] * 64)])
            prefill.run([Prompt(token_ids=[5] * 64 + [6])])
    assert loaded == [0, 64]


@pytest.mark.usefixtures("nothing_left")
def test_a_wrong_plan_is_found() -> None:
    node = DecodeNode(decode_config(inject_fault="token,head"))
    with node, served(node), PrefillNode(prefill_config(node.address)) as prefill:
        (row,) = prefill.run([Prompt(token_ids=list(range(40)))])
    assert row.wrong
    assert "elements are wrong" in str(row.error)


@pytest.mark.usefixtures("nothing_left")
def test_a_start_that_fails_leaves_nothing_open() -> None:
    with DecodeNode(decode_config()) as decode:
        with pytest.raises(AddressInUse), DecodeNode(decode_config(listen=decode.address)):
            pass
        other = prefill_config(decode.address, model=ModelConfig(synthetic="llama-3-8b", layers=3))
        with pytest.raises(PdtxError, match="incompatible peers"), PrefillNode(other):
            pass
    nobody = prefill_config(f"127.0.0.1:{free_port()}", connect_timeout=0.2)
    with pytest.raises(PeerUnreachable), PrefillNode(nobody):
        pass


@pytest.mark.usefixtures("nothing_left")
def test_a_tier_in_memory_is_closed_where_the_one_on_disk_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tiers = TierConfig(kv_offloading_size=1 / 64, kv_offloading_disk_size=1 / 64, kv_offloading_dir=tmp_path / "file")
    for _ in range(3):
        with pytest.raises(TierError, match="cannot keep blocks in"), DecodeNode(decode_config(tiers=tiers)):
            pass


@contextmanager
def closing_at_a_signal(node: DecodeNode | PrefillNode) -> Iterator[None]:
    """Have a signal's handler close a node."""
    before = signal.signal(signal.SIGUSR1, lambda *_: node.close())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("by", ["note", "signal", "stop"])
def test_a_decode_node_may_be_closed_on_the_thread_that_runs_it(by: str) -> None:
    class Closes:
        def is_set(self) -> bool:
            node.close() if by == "stop" else signal.raise_signal(signal.SIGUSR1)
            return False

    def note(line: str) -> None:
        if " served " in line:
            node.close()

    node = DecodeNode(decode_config(), on_note=note if by == "note" else lambda _: None)
    with node, closing_at_a_signal(node):
        assert node.run(limit=0 if by == "note" else None, stop=None if by == "note" else Closes()).requests == 0
        with pytest.raises(InputError, match="not started"):
            node.run()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("by", ["on_end", "signal", "thread"])
def test_a_prefill_node_that_is_closed_while_it_runs_closes_as_the_run_ends(by: str, tmp_path: Path) -> None:
    closers = list[threading.Thread]()

    def closes(_: object) -> None:
        if by == "on_end":
            node.close()
        elif by == "signal":
            signal.raise_signal(signal.SIGUSR1)
        elif not closers:
            closers.append(threading.Thread(target=node.close))
            closers[0].start()

    with DecodeNode(decode_config()) as decode, served(decode):
        node = PrefillNode(
            prefill_config(
                decode.address,
                max_num_seqs=1,
                tiers=TierConfig(kv_offloading_size=1 / 64),
                capture=CaptureConfig(tmp_path / "captured"),
            )
        )
        jobs = [Job("first", [1] * 33), Job("late", [2] * 33, arrival_s=3600.0), Job("last", [3], arrival_s=3600.0)]
        with node, closing_at_a_signal(node):
            rows = node.run(jobs, on_end=closes)
            for closer in closers:
                closer.join(60.0)
            with pytest.raises(InputError, match="not started"):
                node.run(["a"])
    assert [row.error for row in rows] == [None, "the producer was closed", "the producer was closed"]
    assert len((tmp_path / "captured").read_text().splitlines()) == 4


@pytest.mark.usefixtures("nothing_left")
def test_a_node_that_is_closed_while_it_starts_does_not_start() -> None:
    decode = DecodeNode(decode_config(), on_note=lambda _: decode.close())
    with pytest.raises(InputError, match="decode node was closed while it started"), decode:
        pass
    with DecodeNode(decode_config()) as other, served(other):
        prefill = PrefillNode(prefill_config(other.address), on_note=lambda _: prefill.close())
        with pytest.raises(InputError, match="prefill node was closed while it started"), prefill:
            pass


def test_a_prefill_node_runs_once_at_a_time() -> None:
    refused = list[str]()

    def again(_: object) -> None:
        with pytest.raises(InputError) as caught:
            prefill.run([Prompt(token_ids=[1])])
        refused.append(str(caught.value))

    with DecodeNode(decode_config()) as decode, served(decode), PrefillNode(prefill_config(decode.address)) as prefill:
        assert prefill.run([Prompt(token_ids=[1])], on_end=again)[0].ok
        assert prefill.run([Prompt(token_ids=[1])])[0].ok
    assert refused == ["this prefill node is running already; one run() at a time"]


@pytest.mark.usefixtures("nothing_left")
def test_closing_ends_a_run_before_anything_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    happened, close = list[str](), KVConsumer.close

    def closes(consumer: KVConsumer) -> None:
        happened.append("closed")
        close(consumer)

    monkeypatch.setattr(KVConsumer, "close", closes)
    node = DecodeNode(decode_config(), on_note=happened.append)
    results = list[Any]()
    with node:
        thread = threading.Thread(target=lambda: results.append(node.run()))
        thread.start()
        with PrefillNode(prefill_config(node.address)) as prefill:
            prefill.run([Prompt(token_ids=[1])])
        with pytest.raises(InputError, match=r"one run\(\) at a time"):
            node.run()
    thread.join(60.0)
    assert [(found.requests, found.failed) for found in results] == [(1, 0)]
    assert happened[-1] == "closed"
    assert happened[-2].endswith(" served 1 requests, 0 of them failed")
    node.close()
    assert happened.count("closed") == 1


def test_limits_count_anew_for_every_run() -> None:
    class Set:
        def is_set(self) -> bool:
            return True

    with DecodeNode(decode_config(requests=2)) as decode:
        assert decode.run(stop=Set()).requests == 0
        with PrefillNode(prefill_config(decode.address)) as prefill:
            for limit, prompts in ((None, 2), (1, 1), (None, 2)):
                sender = threading.Thread(target=prefill.run, args=([Prompt(token_ids=[1])] * prompts,))
                before = decode.consumer.num_ended
                sender.start()
                assert decode.run(limit=limit).requests == before + prompts
                sender.join(60.0)


@pytest.mark.parametrize(
    "run", [lambda: PrefillNode(prefill_config("h:1")).run(["a"]), lambda: DecodeNode(decode_config()).run()]
)
def test_a_node_that_is_not_started_says_so(run: Callable[[], object]) -> None:
    with pytest.raises(InputError, match="not started; use it in a with statement"):
        run()


def test_prompts_that_cannot_be_used_are_refused() -> None:
    with DecodeNode(decode_config()) as decode, served(decode), PrefillNode(prefill_config(decode.address)) as prefill:
        wrong: list[tuple[Any, str]] = [
            (["text"], "prompt p0 needs a model with weights; --synthetic takes token_ids only"),
            ([""], "a prompt is a text that is not empty, a Prompt or a Job, not ''"),
            ([[1, 2]], r"not \[1, 2\]"),
            ([None], "a Prompt or a Job, not None"),
            (None, "takes a list of prompts, not None"),
            ("ab", "takes a list of prompts, not 'ab'"),
            ([Prompt(token_ids=[])], "prompt p0: token_ids is empty"),
            ([Prompt(token_ids=[1, -1])], r"prompt p0: token_ids.1. is -1; give whole numbers from 0 to 2147483647"),
            ([Prompt(token_ids=[2**31])], r"token_ids.0. is 2147483648"),
            ([Prompt(token_ids=[True])], r"token_ids.0. is True"),
            ([Prompt(token_ids=np.zeros(2))], r"token_ids.0. is 0.0"),  # type: ignore[arg-type]
            ([Prompt(token_ids=np.zeros((2, 2), np.int64))], r"token_ids.0. is .0, 0."),  # type: ignore[arg-type]
            ([Job("a", 5)], "prompt a: token_ids takes a sequence of whole numbers, not 5"),  # type: ignore[arg-type]
            ([Job("a", "5")], r"prompt a: token_ids.0. is '5'"),  # type: ignore[arg-type]
            ([Job("a b", [1])], "prompt id 'a b' cannot be used"),
            ([Job("p0", [1]), Prompt(token_ids=[1]), Job("p0", [2])], "prompt id 'p0' is given twice"),
            ([Prompt(id="a", token_ids=[1]), Prompt(id="a", token_ids=[1])], "prompt id 'a' is given twice"),
        ]
        for prompts, words in wrong:
            with pytest.raises(InputError, match=words):
                prefill.run(prompts)
        with pytest.raises(InputError, match="on_end takes a function of what has ended, not 5"):
            prefill.run([], on_end=5)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="started already"):
            prefill.__enter__()
        with pytest.raises(InputError, match="started already"):
            decode.__enter__()
        assert prefill.run([Prompt(token_ids=[1])])[0].ok


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda ids: [np.int32(one) for one in ids]])
def test_token_ids_may_be_whole_numbers_of_any_kind(kind: Callable[[list[int]], Any]) -> None:
    with DecodeNode(decode_config()) as decode, served(decode), PrefillNode(prefill_config(decode.address)) as prefill:
        rows = prefill.run([Prompt(token_ids=kind([1, 2, 3])), Job("job", kind([1, 2, 3]))])
    assert [(row.wrong, row.error, row.nbytes) for row in rows] == [(0, None, 3 * TOKEN_BYTES)] * 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Prompt(), "give either prompt or token_ids"),
        (lambda: Job("a", [1], max_tokens=0), "request a: max_tokens is 0; give 1 or more"),
        (lambda: Job("a", [1], arrival_s=float("nan")), "request a: arrival_s is nan; give seconds, 0 or more"),
        (lambda: DecodeNode(prefill_config("h:1")), "DecodeNode takes a DecodeConfig, not PrefillConfig"),  # type: ignore[arg-type]
        (lambda: PrefillNode(None), "PrefillNode takes a PrefillConfig, not NoneType"),  # type: ignore[arg-type]
        (lambda: DecodeNode(decode_config(), on_note=None), "on_note of a decode node takes a function"),  # type: ignore[arg-type]
        (lambda: DecodeNode(decode_config()).run(limit="5"), "limit is '5'; give a whole number of requests"),  # type: ignore[arg-type]
        (lambda: DecodeNode(decode_config()).run(limit=-1), "limit is -1; give"),
        (lambda: DecodeNode(decode_config()).run(stop=5), "stop takes what has is_set"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_used_is_refused_where_it_is_given(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_layers_that_the_model_does_not_have_are_refused() -> None:
    config = decode_config(model=ModelConfig(synthetic="llama-3-8b", layers=33))
    with pytest.raises(InputError, match="llama-3-8b has 32 layers that count tokens, so not the first 33"):
        DecodeNode(config).__enter__()


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        (TransportConfig(mover_option=["advertise_host=127.0.0.2"]), "'advertise_host' is given twice"),
        (TransportConfig("shm"), "mover shm has no option 'advertise_host'"),
    ],
)
def test_an_address_to_advertise_is_used_or_refused(transport: TransportConfig, words: str) -> None:
    with pytest.raises(InputError, match=words):
        DecodeNode(decode_config(advertise="127.0.0.1", transport=transport)).__enter__()


def test_capture_tokens_without_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDTX_CAPTURE", raising=False)
    with DecodeNode(decode_config()) as decode:
        config = prefill_config(decode.address, capture=CaptureConfig(capture_tokens=True))
        with pytest.raises(InputError, match="--capture-tokens is for a capture"), PrefillNode(config):
            pass

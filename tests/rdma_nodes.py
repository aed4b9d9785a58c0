"""pdtx-prefill on node 1 and pdtx-decode on node 2, and the proof of what carried the payload."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.rdma_children import Child
from tests.rdma_node import Node, counters, device, grown, mtu

_PORT = 5600
_LIMIT_S = 300.0

WAYS: Mapping[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "ucx": (("--mover", "ucx", "--mover-option", "library=nixl"), {"UCX_TLS": "rc,ud"}),
    "nixl": (("--mover", "nixl"), {"UCX_TLS": "rc,ud"}),
    # What looks like RDMA with TCP to fall back to. The index's UCX has no verbs: it is TCP, and must be told as TCP.
    "control": (
        ("--mover", "ucx", "--mover-option", "library=wheel", "--mover-option", "runtime=raw"),
        {"UCX_TLS": "rc,tcp", "UCX_NET_DEVICES": "all"},
    ),
}
CONTROL = "control"

Add = Callable[..., None]
"""How something that was tried gets into the report: name, problems, facts."""


def load_once(node: Node) -> None:
    """So that what transformers compiles when it first loads a model is there in each of the nodes forked later."""
    import torch

    from pdtx.runner.load import load_model

    load_model(node.share / "model", torch.float32, "cpu")


def run_decode(node: Node, way: str, add: Add) -> None:
    """Serve until the prefill node has had enough."""
    words = _words(node, way, "decode", "prefill")
    words += ["--listen", f"{node.here}:{_PORT}", "--layout", "flashinfer_hnd", "--block-size", "32"]
    before = counters()
    with Child(f"decode-{way}", node.share, _program("decode", [*words, "--verify"]), _settings(way)) as child:
        node.hear(f"prefilled-{way}", 2 * _LIMIT_S)
        child.end()
        status = child.wait(1)
        problems = [] if status == 0 else [f"exit status {status}: {child.last_words()}"]
    add(f"{way}, decode", problems, counters=grown(before))
    node.tell(f"decoded-{way}")


def run_prefill(node: Node, way: str, add: Add) -> None:
    """Send all prompts; with the control also once more with --require rdma, which must fail."""
    try:
        _send(node, way, add)
        if way == CONTROL:
            _refused(node, add)
    finally:
        node.tell(f"prefilled-{way}")
    # The next decode node takes the same port.
    node.hear(f"decoded-{way}", _LIMIT_S)


def _program(name: str, words: Sequence[str]) -> Callable[[], object]:
    def run() -> object:
        from decode_node.__main__ import main as decode
        from prefill_node.__main__ import main as prefill

        sys.argv = [f"pdtx-{name}", *words]
        return (decode if name == "decode" else prefill)()

    return run


def _words(node: Node, way: str, mine: str, peers: str) -> list[str]:
    keys = ["--key", f"{node.share}/{mine}.key_secret", "--peer-key", f"{node.share}/{peers}.key"]
    model = ["--model", f"{node.share}/model", "--dtype", "float32", "--threads", "1", "--num-blocks", "80", "--json"]
    return [*model, *keys, *WAYS[way][0]]


def _settings(way: str) -> dict[str, str]:
    return {"UCX_NET_DEVICES": f"{device()}:1", **WAYS[way][1]}


def _start(node: Node, way: str, name: str, more: Sequence[str]) -> Child:
    words = _words(node, way, "prefill", "decode")
    words += ["--connect", f"{node.peer}:{_PORT}", "--layout", "flash_attn_nhd", "--block-size", "16"]
    words += ["--prompts", f"{node.share}/prompts.jsonl", "--max-tokens", "4", "--ignore-eos"]
    # Both start at once; the decode node takes its time.
    words += ["--connect-timeout", f"{_LIMIT_S / 2}", *more]
    return Child(name, node.share, _program("prefill", words), _settings(way))


def _send(node: Node, way: str, add: Add) -> None:
    before = counters()
    with _start(node, way, f"prefill-{way}", ["--require", "rdma"] if way != CONTROL else []) as child:
        status = child.wait(_LIMIT_S)
        counted = grown(before)
        if status != 0:
            add(way, [f"exit status {status}: {child.last_words()}"], counters=counted)
            return
        document = json.loads(child.out.read_text())
    rows, path = document["requests"], document["path"]
    nbytes = sum(row["nbytes"] for row in rows)
    least = nbytes // mtu()
    problems = [f"{row['request_id']}: wrong {row['wrong']}, {row['error']}" for row in rows if row["wrong"] != 0]
    problems += _path_problems(way, path, [row["carried_by"] for row in rows])
    problems += _counter_problems(way, counted.get("sent_pkts", 0), least)
    wrong = {row["request_id"]: row["wrong"] for row in rows}
    expected = {} if way == CONTROL else {"least_packets": least}
    add(way, problems, path=path, nbytes=nbytes, wrong=wrong, counters=counted, **expected)


def _path_problems(way: str, path: dict[str, Any], carried: Sequence[str]) -> list[str]:
    kind = "tcp" if way == CONTROL else "rdma"
    problems = [] if path["kind"] == kind else [f"the path is told as {path}, not as {kind}"]
    problems += [f"a request was carried by {one}" for one in carried if one != kind]
    if kind == "rdma" and device() not in path["detail"]:
        problems.append(f"the path {path} does not name {device()}")
    return problems


def _counter_problems(way: str, sent: int, least: int) -> list[str]:
    if way == CONTROL:
        return [f"the card has sent {sent} packets, though TCP carried it all"] if sent else []
    return [] if sent >= max(least, 1) else [f"the card has sent {sent} packets, fewer than {least}"]


def _refused(node: Node, add: Add) -> None:
    """--require rdma on a UCX without verbs, on a host with verbs: fails, before any payload."""
    with _start(node, CONTROL, "prefill-refused", ["--require", "rdma"]) as child:
        status = child.wait(_LIMIT_S)
        lines = child.log.read_text().splitlines()
    line = next((line for line in lines if "error:" in line), "")
    good = status in (1, 2) and "rdma" in line and "tcp" in line
    add("control with --require rdma", [] if good else [f"exit status {status}: {line}"], error=line)

"""Metrics: what a scrape says is what has happened."""

import builtins
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from pdtx.errors import AddressInUse, InputError
from pdtx.metrics import NodeCounts, NodeMetrics, TierBytes
from pdtx.results.capture import read_capture
from tests.node_process import NodeProcess, run
from tests.test_nodes import NODE
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.timeout(180)
pytest.importorskip("prometheus_client")

SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$")


def scrape(address: str) -> dict[str, float]:
    """Return the samples by name; of several with one name (a histogram's buckets) the last one."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = (SAMPLE.match(line) for line in text.splitlines())
    return {match[1]: float(match[3]) for match in found if match}


def test_a_scrape_tells_counts_as_they_are_then_and_transfers_by_their_sizes() -> None:
    counts = NodeCounts()
    metrics = NodeMetrics("prefill", "tcp")
    address = metrics.serve("127.0.0.1", 0)
    try:
        metrics.watch("prefill-1", lambda: counts)
        assert scrape(address)["pdtx_num_failed_transfers_total"] == 0
        tiers = [TierBytes("cpu", load=5, store=7)]
        counts = NodeCounts(failed=2, expired=1, cache_usage=0.25, queries=100, hits=40, tiers=tiers)
        metrics.transferred(nbytes=3000, descriptors=12, move_s=0.2, post_s=0.1)
        metrics.transferred(nbytes=1 << 33, descriptors=1)
        found = scrape(address)
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        metrics.close()
    expected = {
        "pdtx_num_failed_transfers_total": 2,
        "pdtx_num_kv_expired_reqs_total": 1,
        "pdtx_kv_cache_usage_perc": 0.25,
        "pdtx_external_prefix_cache_queries_total": 100,
        "pdtx_external_prefix_cache_hits_total": 40,
        "pdtx_kv_offload_load_bytes_total": 5,
        "pdtx_kv_offload_store_bytes_total": 7,
        "pdtx_bytes_transferred_sum": 3000 + (1 << 33),
        "pdtx_bytes_transferred_count": 2,
        "pdtx_num_descriptors_sum": 13,
        "pdtx_xfer_time_seconds_sum": 0.2,
        "pdtx_xfer_time_seconds_count": 1,
        "pdtx_post_time_seconds_sum": 0.1,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    labels = 'engine_id="prefill-1",role="prefill",tier="cpu",transport="tcp"'
    buckets = dict(re.findall(r'pdtx_bytes_transferred_bucket\{.*,le="([^"]+)".*\} (\S+)', text))
    assert [float(edge) for edge in list(buckets)[:-1]] == [2.0**power for power in range(10, 33)]
    assert (buckets["2048.0"], buckets["4096.0"], buckets["4.294967296e+09"]) == ("0.0", "1.0", "1.0")
    assert f"pdtx_kv_offload_load_bytes_total{{{labels}}} 5.0" in text


@pytest.mark.parametrize(
    ("role", "words"), [("prefill", "contiguous on both sides"), ("decode", "contiguous in this node's cache")]
)
def test_descriptors_say_what_each_side_counts(role: Literal["prefill", "decode"], words: str) -> None:
    """A decode node does not know where pieces lay, so that its number is another one than the prefill node's."""
    metrics = NodeMetrics(role, "tcp")
    metrics.watch("node", NodeCounts)
    (told,) = (one.documentation for one in metrics.registry.collect() if one.name == "pdtx_num_descriptors")
    assert words in told


def test_two_nodes_of_one_process_do_not_mix_and_a_closed_one_answers_no_more() -> None:
    one, other = NodeMetrics("prefill", "tcp"), NodeMetrics("decode", "shm")
    addresses = [each.serve("127.0.0.1", 0) for each in (one, other)]
    one.watch("a", NodeCounts)
    other.watch("b", lambda: NodeCounts(failed=1))
    try:
        assert [scrape(address)["pdtx_num_failed_transfers_total"] for address in addresses] == [0, 1]
    finally:
        one.close()
        other.close()
    with pytest.raises(urllib.error.URLError):
        scrape(addresses[0])


def test_nothing_is_read_from_a_node_after_its_metrics_are_closed() -> None:
    """Not by a scrape that was under way, either."""
    metrics, read, closed, told = NodeMetrics("prefill", "tcp"), threading.Event(), threading.Event(), list[str]()
    address = metrics.serve("127.0.0.1", 0)

    def counts() -> NodeCounts:
        read.set()
        closed.wait(0.5)
        told.append("read")
        return NodeCounts()

    metrics.watch("node", counts)
    scraping = threading.Thread(target=scrape, args=(address,))
    scraping.start()
    assert read.wait(10)
    metrics.close()
    told.append("closed")
    closed.set()
    scraping.join(10)
    assert told == ["read", "closed"]
    assert not any("failed" in one.name for one in metrics.registry.collect())
    assert told == ["read", "closed"]


def test_a_port_that_is_taken_and_a_host_that_is_none_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=rf"no metrics at 127.0.0.1:{port}: .+ choose another --metrics-port"):
            NodeMetrics("decode", "tcp").serve("127.0.0.1", port)
        done = run("decode_node", "--synthetic", "llama-3-8b", "--metrics-port", str(port), "--listen", "127.0.0.1:0")
    assert done.code == 1
    assert f"no metrics at 127.0.0.1:{port}" in done.error
    with pytest.raises(InputError, match=r"no metrics at no\.such.host.invalid:0"):
        NodeMetrics("decode", "tcp").serve("no.such.host.invalid", 0)


def test_without_the_library_the_line_to_install_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    true_import = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> object:  # noqa: ANN401
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return true_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'pdtx\[metrics\]'"):
        NodeMetrics("decode", "tcp")


# -- real nodes -------------------------------------------------------------------------------------------------------


START_S = 60.0


def metered(folder: Path, name: str, *arguments: str | Path) -> NodeProcess:
    """A node with metrics, its log in JSON."""
    flags = ("--metrics-port", "0", "--log-format", "json", "--log-level", "info", "--json")
    return NodeProcess(folder, name, f"{name}_node", *arguments, *flags)


def metrics_of(node: NodeProcess) -> str:
    return node.wait_for(r"metrics at http://(\S+)/metrics", START_S)[1]


COUNT = "pdtx_bytes_transferred_count"
REQUEST_BYTES = 64 * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, channels, bytes


def sums_up(found: Mapping[str, float]) -> bool:
    return found["pdtx_bytes_transferred_sum"] == found[COUNT] * REQUEST_BYTES


def asked_for(found: Mapping[str, float]) -> float:
    return found["pdtx_external_prefix_cache_queries_total"]


def scrape_until(address: str, holds: Callable[[Mapping[str, float]], bool]) -> dict[str, float]:
    """Return what agrees with itself, or, if nothing does for so long, what does not.

    A node counts while it is asked: what it says of one thing may be older than what it says of the next.
    """
    limit = time.monotonic() + 10
    while not holds(found := scrape(address)) and time.monotonic() < limit:
        time.sleep(0.001)
    return found


def test_both_nodes_are_scraped_while_they_work_and_what_they_did_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts, captured = tiny_checkpoint(tmp_path), tmp_path / "prompts.jsonl", tmp_path / "captured"
    lines = [{"id": f"k{at}", "token_ids": [at, *range(63)]} for at in range(200)]
    lines += [{"id": "long", "token_ids": [1] * 255}]  # too long for the model with its answer
    prompts.write_text("\n".join(map(json.dumps, reversed(lines))))
    common = ("--model", model, *NODE)
    monkeypatch.setenv("PDTX_CAPTURE", str(captured))
    with metered(tmp_path, "decode", *common, "--listen", "127.0.0.1:0", "--verify") as decode:
        address = decode.wait_for(r"listening on ([0-9.:]+)", START_S)[1]
        sends = ("--connect", address, "--prompts", prompts, "--max-tokens", "4", "--kv-offloading-size", "0.01")
        with metered(tmp_path, "prefill", *common, *sends) as prefill:
            prefill.wait_for(r"request k\d+ ended well", START_S)
            # Tokens are asked for when a request begins, and its bytes counted when it has ended: between two of them.
            between = lambda found: sums_up(found) and asked_for(found) == found[COUNT] * 64  # noqa: E731
            ours = scrape_until(metrics_of(prefill), between)
            theirs = scrape_until(metrics_of(decode), sums_up)
    lines_of_decode = [json.loads(line) for line in decode.said.splitlines()]
    count = ours[COUNT]
    assert count >= 1
    assert sums_up(ours)
    assert ours["pdtx_xfer_time_seconds_sum"] > 0
    assert ours["pdtx_num_descriptors_sum"] >= count
    assert ours["pdtx_num_failed_transfers_total"] == 1
    assert ours["pdtx_kv_offload_store_bytes_total"] > 0
    assert 0 < asked_for(ours) == count * 64
    assert 0 < ours["pdtx_kv_cache_usage_perc"] <= 1
    assert sums_up(theirs)
    assert theirs[COUNT] > 0
    verified = [line for line in lines_of_decode if " verified: " in line["message"]]
    assert {line["request_id"] for line in verified} <= {f"k{at}" for at in range(200)}
    assert {"time", "level", "logger", "message"} <= set(verified[0])
    _, requests = read_capture(captured)
    by_name = {request.request_id: request for request in requests}
    assert by_name["long"].outcome == "failed"
    assert sum(request.outcome == "verified" for request in requests) >= count

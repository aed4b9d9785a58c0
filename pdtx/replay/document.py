"""The result of a replay: JSON with every request's row, and what they come to as text.

History of the format, the field `version` (`format` is "pdtx-replay"):
1  this one.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pdtx.engine import KVProducer
from pdtx.replay.plan import ReplayPlan
from pdtx.replay.rows import figures
from pdtx.replay.run import Outcome
from pdtx.replay.synthetic import SyntheticComputer
from pdtx.report import machine_facts
from pdtx.units import counted, format_bytes, format_seconds

REPLAY_FORMAT = "pdtx-replay"
REPLAY_VERSION = 1


def result_document(
    plan: ReplayPlan,
    outcome: Outcome,
    computer: SyntheticComputer,
    producer: KVProducer,
    *,
    settings: Mapping[str, Any],
    tiers: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the result of a replay. settings: flags that the plan does not hold; tiers: what they counted.

    computed_s: seconds that prefill was to take in all, late_s: by which it took longer because of this machine.
    """
    stopped = outcome.stopped
    return {
        "format": REPLAY_FORMAT,
        "version": REPLAY_VERSION,
        "command": sys.argv,
        "machine": machine_facts(),
        "trace": {
            "name": plan.source.path.name,
            "captured": plan.source.header is not None,
            "block_tokens": plan.source.block_tokens,
            "scale_tokens": plan.scale.by,
            "speedup": plan.scale.speedup,
            "max_requests": plan.most,
        },
        "settings": {
            "pool_size": plan.pool,
            "chunk_size": plan.chunk_size,
            "max_num_seqs": plan.max_num_seqs,
            "timeout_s": plan.timeout_s,
            "deadline_s": plan.deadline_s,
            **settings,
        },
        "path": msgspec.to_builtins(producer.path),
        "complete": stopped is None,
        "stopped": stopped.why if stopped is not None else None,
        "seconds": outcome.seconds,
        "computed_s": computer.computed_s,
        "late_s": computer.late_s,
        "tiers": tiers,
        "figures": figures(outcome.rows),
        "requests": msgspec.to_builtins(outcome.rows),
    }


def summary_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a replay came to, a line each."""
    found, trace = document["figures"], document["trace"]
    rest = "" if document["complete"] else f"; CUT OFF: {document['stopped']}"
    yield (
        f"{trace['name']}: {counted(found['requests'], 'request')}, {found['failed']} failed, "
        f"{counted(found['prompt_tokens'], 'prompt token')}, {document['seconds']:.3g} s at speed "
        f"{trace['speedup']:g}{rest}"
    )
    yield (
        f"hit rate             {found['hit_rate']:.2%} of tokens from this node's tiers"
        f"; {found['peer_cached_tokens']:,} tokens were at the decode node"
    )
    yield f"time to first token  {_times(found['ttft_s'])}; transfer's share {found['transfer_share']:.2%}"
    yield f"  of it queueing     {_times(found['queue_s'])}"
    yield f"  transfer exposed   {_times(found['exposed_s'])}"
    moved = f"{format_bytes(found['nbytes'])}, {found['gb_per_s']:.3g} GB/s"
    yield f"transfer             {_times(found['move_s'])}; {moved}"
    for usage in document["tiers"]:
        yield f"{'tier ' + usage['name']:<20} {_tier(usage)}"
    wrong = "unverified" if found["wrong"] is None else f"{found['wrong']:,}"
    yield f"#wrong               {wrong} ({found['verified']} of {counted(found['requests'], 'request')} verified)"
    late = document["late_s"]
    if late > document["computed_s"] * 0.05:
        yield (
            f"prefill took {format_seconds(late)} longer than the {format_seconds(document['computed_s'])} that it was "
            "to take, which spoils the times to first token and of queueing: this machine was busy, or fills caches "
            "no faster; take fewer --layers, or a lower --prefill-rate"
        )


def _tier(usage: Mapping[str, Any]) -> str:
    """Return what a tier holds and has done; blocks of all its groups together."""
    done = ", ".join(
        f"{sum(group[name]['blocks'] for group in usage['groups']):,} {name}"
        for name in ("stored", "loaded", "evicted", "missed")
    )
    used = sum(group["used"]["nbytes"] for group in usage["groups"])
    return f"{format_bytes(used)} used of {format_bytes(usage['mapped'])}; blocks: {done}"


def _times(values: Mapping[str, float | None]) -> str:
    parts = [
        f"{name} {format_seconds(value)}" for name, value in values.items() if value is not None and name[0] == "p"
    ]
    return ", ".join(parts) or "none"

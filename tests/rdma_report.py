"""Puts the reports of two nodes together: python -m tests.rdma_report FOLDER. Exit status 1 unless all is well."""

import json
import sys
from pathlib import Path
from typing import Any


def read(folder: Path) -> list[dict[str, Any]]:
    """The entries of both nodes; that a node has no report, or not all of it, is an entry that is not ok."""
    entries = list[dict[str, Any]]()
    for node in (1, 2):
        try:
            report = json.loads((folder / f"report.{node}.json").read_text())
            found, problem = [{**entry, "node": node} for entry in report["entries"]], ""
            if report["ended"] is not True or not found:
                problem = "it has not come to its end"
        except (OSError, ValueError, TypeError, KeyError) as error:
            found, problem = [], f"it has left no report ({type(error).__name__})"
        entries += found
        if problem:
            problems = [f"{problem}: see .lab/console and .lab/out beside this file"]
            entries.append({"node": node, "stage": "all", "name": "itself", "ok": False, "problems": problems})
    return entries


def is_well(entry: dict[str, Any]) -> bool:
    return entry["ok"] is True and not entry["problems"]


def facts(entry: dict[str, Any]) -> str:
    """What there is to be told of an entry, in one line."""
    words = list[str]()
    if "path" in entry:
        path = entry["path"]
        words.append(f"{path['kind']} ({path['detail']}, {path['library']})")
    if "nbytes" in entry:
        words.append(f"{entry['nbytes']} bytes, wrong elements {sum(entry['wrong'].values())}")
    if "counters" in entry:
        sent, received = (entry["counters"].get(name, 0) for name in ("sent_pkts", "rcvd_pkts"))
        least = f" of at least {entry['least_packets']}" if entry.get("least_packets") else ""
        words.append(f"card: {sent} packets sent{least}, {received} received")
    words += [str(entry[name]) for name in ("result", "error") if name in entry]
    words += [_fault(one) for one in entry.get("seen", ())]
    return "; ".join([*entry.get("problems", ()), *words])


def _fault(one: dict[str, Any]) -> str:
    if "error" in one:
        return f"{one['fault']}: {one['error']} after {one['after_s']} s"
    if "lost_packets" in one:
        again = sum(
            one["counters"].get(name, 0) for name in ("completer_retry_err", "rcvd_seq_err", "retry_exceeded_err")
        )
        return f"{one['fault']}: exact, {one['lost_packets']} packets lost, {again} sequence errors and retries"
    later = f", {one['written_later']} bytes written later" if "written_later" in one else ", exact"
    return f"{one['fault']}{later}"


def main() -> int:
    folder = Path(sys.argv[1])
    entries = read(folder)
    (folder / "report.json").write_text(json.dumps(entries, indent=2) + "\n")
    for entry in entries:
        verdict = "ok  " if is_well(entry) else "FAIL"
        sys.stdout.write(f"{verdict} node {entry['node']} {entry['stage']} {entry['name']}: {facts(entry)}\n")
    return 0 if all(map(is_well, entries)) else 1


if __name__ == "__main__":
    sys.exit(main())

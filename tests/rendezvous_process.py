"""A process of a run: python -m tests.rendezvous_process PREFILL DECODE [MOVE_SECONDS]. Rank 0 prints a result."""

import os
import sys
import time

import msgspec

from pdtx.bench.rendezvous import Place, Rendezvous
from pdtx.errors import PdtxError
from pdtx.results.model import Case
from tests.fake_station import MAX_BYTES, FakeStation


def _run() -> None:
    place = Place.from_environment(os.environ, int(sys.argv[1]), int(sys.argv[2]))
    move_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.002
    station = FakeStation(move_s=move_s)
    timeout_s = float(os.environ.get("TEST_TIMEOUT", "60"))
    with Rendezvous(place, station, max_bytes=MAX_BYTES, timeout_s=timeout_s) as rendezvous:
        if not place.drives:
            rendezvous.serve()
            return
        fleet = rendezvous.fleet()
        sys.stdout.write("connected\n")
        sys.stdout.flush()
        result = fleet.measure(
            Case(), iterations=3, warmup=0, verify=True, references=[], deadline=time.monotonic() + 60.0
        )
        hosts = [[node.role, node.rank] for node in fleet.nodes]
        links = [[link.prefill, link.decode] for link in result.links]
        answer = {"error": result.error, "nodes": hosts, "links": links, "samples": len(result.samples)}
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")


def main() -> None:
    """Take part; an error is a line on stderr and exit code 1."""
    try:
        _run()
    except PdtxError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()

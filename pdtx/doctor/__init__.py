"""What this machine has for moving KV caches, what it lacks, and how to mend it: `pdtx doctor`."""

from pdtx.doctor.examine import WANTS, examine, parse_wants
from pdtx.doctor.finding import Finding, Level
from pdtx.doctor.machine import Machine

__all__ = ["WANTS", "Finding", "Level", "Machine", "examine", "parse_wants"]

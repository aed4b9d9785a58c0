"""What the lab tells people, and the error that ends it."""

import sys


class LabError(Exception):
    """The lab cannot do what it was asked to do; one line that says why and what to do."""


def say(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"rdma-lab: {text}\n")
    sys.stderr.flush()

"""Child processes, as commands start them: see pdtx.process."""

from pdtx.process import Node, follow_parent

__all__ = ["Node", "follow_parent"]

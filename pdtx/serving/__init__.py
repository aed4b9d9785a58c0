"""What a prefill node does with prompts, whether a model computes them or something that only takes as long."""

from pdtx.serving.computer import Computer, ModelComputer
from pdtx.serving.jobs import Chunk, Ended, Job
from pdtx.serving.scheduler import PrefillScheduler

__all__ = ["Chunk", "Computer", "Ended", "Job", "ModelComputer", "PrefillScheduler"]

"""Who computes prompts: a model, or something that stands for one."""

from typing import Protocol

import torch

from pdtx.runner import ModelRunner, PagedSequence
from pdtx.runner.pages import OnLayer
from pdtx.serving.jobs import Job


class Computer(Protocol):
    """Computes prompts into paged caches, a chunk at a time.

    max_model_len: tokens of prompt and answer. resumes: whether it can go on behind tokens that it did not compute.
    """

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""

    @property
    def resumes(self) -> bool:
        """See ModelRunner.resumes."""

    def chunk(self, num_tokens: int, chunk_size: int) -> int:
        """Return how many of the num_tokens tokens that are left of a prompt to compute at once."""

    def compute(self, job: Job, sequence: PagedSequence, stop: int, on_layer: OnLayer) -> torch.Tensor:
        """Compute a job's tokens from sequence.num_tokens to stop; return logits (vocab,) of the last.

        on_layer: see ModelRunner.forward, which says what is raised as well.
        """


class ModelComputer:
    """A model that computes prompts."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        return self.runner.max_model_len

    @property
    def resumes(self) -> bool:
        """See ModelRunner.resumes."""
        return self.runner.resumes

    def chunk(self, num_tokens: int, chunk_size: int) -> int:
        """See ModelRunner.chunk."""
        return self.runner.chunk(num_tokens, chunk_size)

    def compute(self, job: Job, sequence: PagedSequence, stop: int, on_layer: OnLayer) -> torch.Tensor:
        """Compute a job's tokens up to stop; see Computer."""
        start = sequence.num_tokens
        features = None if start else job.features
        return self.runner.forward(sequence, job.token_ids[start:stop], on_layer=on_layer, features=features)

"""The least that an object around a step does."""

from typing import Any

from peer_loops import Job

PACKAGE = None
COLUMNS = ("plain",)


class Wrapper:
    """Counts."""

    def __init__(self, f: Any) -> None:
        self.f = f
        self.n = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        out = self.f(*args, **kwargs)
        self.n += 1
        return out


def train(job: Job) -> None:
    wrapper = Wrapper(job.step)
    for batch in job.batches:
        wrapper.run(batch)

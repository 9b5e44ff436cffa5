"""The least that any object around a step has to do."""

from typing import Any

from peer_loops import Job

PACKAGE = None
COLUMNS = ("plain",)


class Wrapper:
    """Calls a function and counts the calls."""

    def __init__(self, f: Any) -> None:
        self.f = f
        self.n = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step."""
        out = self.f(*args, **kwargs)
        self.n += 1
        return out


def train(job: Job) -> None:
    wrapper = Wrapper(job.step)
    for batch in job.batches:
        wrapper.run(batch)

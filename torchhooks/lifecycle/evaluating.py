"""Putting back what an evaluation disturbs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from torchhooks.checkpoints.contents import modules_of
from torchhooks.common.errors import Attempts
from torchhooks.common.random_states import random_states, set_random_states
from torchhooks.fetches.evaluation import ComposedFetch
from torchhooks.fetches.names import Fetch, Value, parameters_of
from torchhooks.lifecycle.session import Session
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.ranks import reshard


class Undo:
    """Captures what code that torchhooks does not know may change, and puts it back, the last first.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> undo = Undo().random_states().gradients([weight])
    >>> weight.grad = torch.rand(1)
    >>> undo.put_back()
    >>> print(weight.grad)
    None
    """

    def __init__(self) -> None:
        self._calls: list[tuple[str, Callable[[], object]]] = []

    def add(self, name: str, call: Callable[[], object]) -> Undo:
        """Have ``call`` put back what is called ``name``."""
        self._calls.append((name, call))
        return self

    def put_back(self, only: str | None = None) -> None:
        """Put everything back, or what is called ``only``.

        Raises:
            Exception: what a call raised, once all others were made; several as an ExceptionGroup.
        """
        attempt = Attempts()
        for name, call in reversed(self._calls):
            if only in (None, name):
                attempt(call)
        attempt.raise_errors("several errors while what an evaluation disturbed was put back")

    def random_states(self) -> Undo:
        """Capture the random states of Python, NumPy and torch."""
        return self.add("random", partial(set_random_states, random_states()))

    def gradients(self, parameters: Iterable[torch.Tensor]) -> Undo:
        """Capture which tensors are the gradients of ``parameters``. What is added to one in place stays."""
        captured = [(parameter, parameter.grad) for parameter in parameters]

        def undo() -> None:
            for parameter, gradient in captured:
                if parameter.grad is not gradient:
                    parameter.grad = gradient

        return self.add("gradients", undo)

    def modes(self, modules: Iterable[torch.nn.Module]) -> Undo:
        """Capture which of ``modules`` and of the modules in them are in training mode."""
        captured = [(module, module.training) for each in modules for module in each.modules()]

        def undo() -> None:
            for module, training in captured:
                if module.training is not training:
                    module.train(training)  # not only the attribute: some modules merge or freeze weights in train()
            for module, training in captured:
                module.training = training  # train() of a module changes those inside of it

        return self.add("modes", undo)


def undisturbed(session: Session) -> Undo:
    """Capture what an evaluation may disturb in ``session``: random states, gradients and the training mode."""
    modules = modules_of(session)
    own = [(module, [*module.parameters()]) for module in modules]
    parameters = [*(p for _, each in own for p in each), *parameters_of(session.optimizer)]

    def put_back_shards() -> None:
        for module, before in own:
            if any(map(operator.is_not, before, module.parameters())):
                reshard(module)  # the forward pass of the evaluation has put whole parameters in place of DTensors

    return Undo().random_states().gradients(parameters).add("shards", put_back_shards).modes(modules)


@contextmanager
def evaluating(session: Session) -> Iterator[None]:
    """Put the modules of ``session`` into evaluation mode, and put back at the end what an evaluation disturbs."""
    before = undisturbed(session)
    try:
        for module in modules_of(session):
            module.eval()
        yield
    finally:
        before.put_back()


class Undisturbed(ComposedFetch):
    """A fetch after whose evaluation everything that it disturbs is put back, also if it raises."""

    is_fixed = False

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def prepare(self, session: TrainingState) -> Callable[[], object]:
        assert isinstance(session, Session)  # the only class of sessions
        return undisturbed(session).put_back

    def compose(self, value: Value) -> Value:
        return value

"""One run, watched: what it gets, which modules and operators run in it, and what the optimizer does.

Nothing that is watched changes: hooks of torch only look, and are removed when the run is over.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from torchhooks.checkpoints.contents import register_step_post_hook
from torchhooks.fetches.names import Value, canonical, parameters_of
from torchhooks.fetches.watch import Catch
from torchhooks.lifecycle.hook import SessionRunContext
from torchhooks.lifecycle.session import Session
from torchhooks.tools.autopsy.figures import Figures, figures_of, has_numbers, part_of, tensors_in
from torchhooks.tools.autopsy.operations import Operations

_MOST_CALLS = 4  # whose figures are kept of one module in one run
Attempt = Callable[..., Any]
"""Calls its first argument with the others, and keeps an error from the training run."""


class RunInputs(NamedTuple):
    """What one run gets: the arguments of the step, or the item of the data if the step is the body of a ``with``."""

    batch: object
    what: str
    """What ``batch`` is, for a person."""
    named: dict[str, object]

    @classmethod
    def of(cls, run_context: SessionRunContext) -> RunInputs:
        inputs = run_context.inputs()
        if inputs:
            named = {f"input {name}": value for name, value in inputs.items()}
            return cls(inputs, "the arguments of the step, by name", named)
        item = run_context.session.position.current_item
        return cls(item, "the item of the innermost until_stop", {"item": item})

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors with their names; of several in one argument, all but the first have a number."""
        for name, value in self.named.items():
            for index, tensor in enumerate(tensors_in(value)):
                yield f"{name}[{index}]" if index else name, tensor


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module. The path of the model is empty."""

    path: str
    class_name: str
    inputs: list[Figures]
    outputs: list[Figures]


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """The figures of one run."""

    step: int
    """The global step that the run has made, or was to make."""
    state: dict[str, Figures]
    """What was there before the run: parameters, buffers, the states of the optimizer and what is in ``state``."""
    epoch: int | None = None
    item: int | None = None
    """The number of the item in the epoch."""
    modules: list[ModuleCall] = field(default_factory=list)
    """The calls of modules, in the order in which they ended."""
    gradients: dict[str, float] = field(default_factory=dict)
    """The norms of the gradients at the optimizer's step, by the name of the parameter."""
    gradient_norm: float | None = None
    optimizer_steps: int = 0
    lr: list[float] = field(default_factory=list)
    value: object = None
    """The value that the hook looks at."""


_eager_lock, _eager_stance = threading.Lock(), ExitStack()
_eager_users = 0


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Run compiled code as Python inside this ``with`` block."""
    # The stance is that of the process. Of several loops in threads, each would put back the one that it found, which
    # may be another loop's. So the first sets it, and the last puts it back.
    global _eager_users
    with _eager_lock:
        if not _eager_users:
            _eager_stance.enter_context(torch.compiler.set_stance("force_eager"))
        _eager_users += 1
    try:
        yield
    finally:
        with _eager_lock:
            _eager_users -= 1
            if not _eager_users:
                _eager_stance.close()


class _BegunRun(NamedTuple):
    """The run that is watched."""

    step: int
    state: dict[str, Figures]
    epoch: int | None
    item: int | None
    modules: list[ModuleCall]
    optimizer: OptimizerSteps


class RunWatcher:
    """Watches runs of ``session``, one at a time: :meth:`begin` one, and :meth:`end` it.

    Args:
        session: the session of the runs.
        counts_runs: whether each run makes one global step.
        attempt: makes the calls from the hooks of torch, whose errors would be errors of the step.
    """

    def __init__(self, session: Session, counts_runs: bool, attempt: Attempt) -> None:
        self._session, self._counts_runs, self._attempt = session, counts_runs, attempt
        self._stack = ExitStack()
        self.operations = Operations(lambda: self._modules.path(), self._is_step_made)
        self._modules = Modules(session.model, self.operations.paused, attempt)
        self._begun: _BegunRun | None = None
        self.runs: list[WatchedRun] = []
        """The runs that are over."""
        self.eager = False
        """Whether compiled code was run as Python instead."""
        self.watched_from: int | None = None
        """The first step whose operators were watched."""

    @property
    def step(self) -> int | None:
        """The global step that the run which is watched is to make; ``None`` if none is watched."""
        return None if self._begun is None else self._begun.step

    def begin(self, inputs: RunInputs, is_last: bool) -> None:
        """Watch the run that begins."""
        session, is_compiled = self._session, _uses_compiler(self._session.model)
        step, named = session.global_step + 1, named_state(session)
        state = {name: Figures.of(tensor) for name, tensor in named}
        optimizer = OptimizerSteps(session, self.operations.paused, self._attempt)
        self._begun = _BegunRun(step, state, session.epoch, session.batch, [], optimizer)
        # Also in a run of compiled code, whose operators and modules are not watched.
        self._stack.enter_context(optimizer.watched())
        if is_compiled and not is_last:
            return  # compiled code is not seen, and would be another code if it were
        self.eager = is_compiled
        # Also for what the step compiles first in this run, and for operators that compile themselves.
        self._stack.enter_context(_eager())
        self.watched_from = self.watched_from or step
        self._modules.open(self._begun.modules)
        self._stack.callback(self._modules.close)
        self.operations.begin(len(self.runs), step, named, inputs.tensors())
        # Entered last, and so left first: no operator of torchhooks before or after the run is looked at.
        self._stack.enter_context(self.operations)

    def end(self, step: int, value: object = None) -> None:
        """Watch nothing, now that the run is over, which has made the global step ``step``, with ``value``."""
        # First, or the norms below would be taken for operators of the run.
        self.close()
        begun, self._begun = self._begun, None
        assert begun is not None, "end() without begin()"
        self.operations.end(step)
        optimizer = begun.optimizer
        # Those that optimizer.step() was called with, because the script may set the gradients to zero after it. A run
        # that only accumulates gradients calls no optimizer.step().
        gradients = optimizer.gradients or _gradient_norms(self._session)
        self.runs.append(
            WatchedRun(
                step=step,
                state=begun.state,
                epoch=begun.epoch,
                item=begun.item,
                modules=begun.modules,
                gradients=gradients,
                gradient_norm=math.sqrt(sum(norm * norm for norm in gradients.values())) if gradients else None,
                optimizer_steps=optimizer.count,
                lr=optimizer.lr or _lr(self._session),
                value=value,
            )
        )

    def close(self) -> None:
        """Remove all hooks."""
        self._stack.close()

    def _is_step_made(self) -> bool:
        return self._counts_runs and self.step is not None and self._session.global_step >= self.step


class OptimizerSteps:
    """What the optimizer of ``session`` does in one run: how often it steps, and with what the last time.

    Args:
        session: the session of the run.
        paused: ``paused()`` is entered while figures are computed.
        attempt: computes the figures.
    """

    def __init__(self, session: Session, paused: Callable[[], AbstractContextManager[None]], attempt: Attempt) -> None:
        self._session, self._paused, self._attempt = session, paused, attempt
        self.count = 0
        self.gradients: dict[str, float] = {}
        """The norms of the gradients, by the name of the parameter."""
        self.lr: list[float] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the optimizer inside this ``with`` block."""
        optimizer = self._session.optimizer
        with ExitStack() as stack:
            if optimizer is not None and hasattr(optimizer, "register_step_pre_hook"):
                before = optimizer.register_step_pre_hook(lambda *_: self._attempt(self._look))
                stack.callback(before.remove)
                stack.callback(register_step_post_hook(optimizer, self._count).remove)
            yield

    def _look(self) -> None:
        with self._paused():
            self.gradients, self.lr = _gradient_norms(self._session), _lr(self._session)

    def _count(self, *_: object) -> None:
        self.count += 1


class Modules:
    """Watches the calls of ``model`` and of its submodules from :meth:`open` to :meth:`close`.

    Args:
        model: the model.
        paused: ``paused()`` is entered while figures are computed.
        attempt: computes the figures.
    """

    def __init__(
        self, model: torch.nn.Module | None, paused: Callable[[], AbstractContextManager[None]], attempt: Attempt
    ) -> None:
        self._model, self._paused, self._attempt = model, paused, attempt
        self._running: list[tuple[str, list[Figures]]] = []
        self._counts: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []

    def open(self, calls: list[ModuleCall]) -> None:
        """Begin to watch, and append the calls to ``calls``."""
        self._running, self._counts = [], {}
        named = [] if self._model is None else self._model.named_modules()
        # Of a wrapper and the module in it, which have one path, the module comes last.
        for path, module in {canonical(f"{name}.").removesuffix("."): module for name, module in named}.items():
            if not isinstance(module, torch.jit.ScriptModule):  # which refuses hooks
                self._watch(module, path, calls)

    def path(self) -> str | None:
        """Return the path of the module that is running; ``None`` outside of the model."""
        return self._running[-1][0] if self._running else None

    def close(self) -> None:
        """Remove all hooks on modules."""
        while self._handles:
            self._handles.pop().remove()

    def _watch(self, module: torch.nn.Module, path: str, calls: list[ModuleCall]) -> None:
        def on_call(args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> None:
            self._counts[path] = self._counts.get(path, 0) + 1
            with self._paused():
                # Also beyond _MOST_CALLS, because path() has to name the module that is running.
                self._running.append((path, figures_of((args, kwargs)) if self._counts[path] <= _MOST_CALLS else []))

        def on_return(_args: tuple[Value, ...], output: Value) -> None:
            while self._running and self._running[-1][0] != path:  # of a module whose call raised
                self._running.pop()
            inputs = self._running.pop()[1] if self._running else []
            if self._counts.get(path, 0) <= _MOST_CALLS:
                with self._paused():
                    calls.append(ModuleCall(path, type(module).__name__, inputs, figures_of(output)))

        before: Callable[..., None] = functools.partial(self._attempt, on_call)
        after: Callable[..., None] = functools.partial(self._attempt, on_return)
        self._handles.append(module.register_forward_pre_hook(Catch(module, before), with_kwargs=True))
        self._handles.append(module.register_forward_hook(Catch(module, after)))


def named_state(session: Session) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that stay from run to run, by name.

    They are parameters, buffers, the states of the optimizer, and what is in the ``state`` of the loop.
    """
    found: list[tuple[str, torch.Tensor]] = []
    names: dict[int, str] = {}
    if session.model is not None:
        for name, parameter in session.model.named_parameters():
            names[id(parameter)] = canonical(name)
            found.append((f"parameter {canonical(name)}", parameter))
        found += [(f"buffer {canonical(name)}", buffer) for name, buffer in session.model.named_buffers()]
    found += _optimizer_state(session.optimizer, names)
    for name, value in session.state.items():
        if isinstance(value, torch.nn.Module):
            members = [(f".{key}", each) for key, each in (*value.named_parameters(), *value.named_buffers())]
        elif isinstance(value, torch.optim.Optimizer):
            members = [(f": {key}", each) for key, each in _optimizer_state(value, {})]
        else:
            pytree = torch.utils._pytree  # noqa: SLF001 - the structures that modules and operators take
            leaves = pytree.tree_leaves_with_path(getattr(value, "__dict__", {}))
            members = [(pytree.keystr(path), each) for path, each in leaves if isinstance(each, torch.Tensor)]
        found += [(f"{name}{member}", each) for member, each in members if id(each) not in names]
    return [(name, tensor) for name, tensor in found if has_numbers(part_of(tensor))]


def _optimizer_state(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (parameter, state) in enumerate(getattr(optimizer, "state", {}).items()):
        owner = names.get(id(parameter), f"parameter {number}")
        yield from ((f"{key} of {owner}", each) for key, each in state.items() if isinstance(each, torch.Tensor))


def _lr(session: Session) -> list[float]:
    groups = getattr(session.optimizer, "param_groups", [])
    return [float(group["lr"]) for group in groups if "lr" in group]


def _gradient_norms(session: Session) -> dict[str, float]:
    """Return the norm of each gradient that the optimizer has, of this rank's part, by the name of its parameter."""
    names = {} if session.model is None else {id(each): name for name, each in session.model.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for number, parameter in enumerate(parameters_of(session.optimizer)):
        if parameter.grad is not None and has_numbers(grad := part_of(parameter.grad)):
            name = canonical(names.get(id(parameter), f"parameter {number}"))
            found[name] = torch.linalg.vector_norm(grad.detach())
    return {name: norm.item() for name, norm in found.items()}


def _uses_compiler(model: torch.nn.Module | None) -> bool:
    """Return whether code of this process was compiled by ``torch.compile``, or code of ``model`` is to be."""
    # Not imported here: that takes more than a second, and code was compiled only if the module is there.
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["frames"].get("ok"):
        return True
    modules = [] if model is None else [*model.modules()]
    return any("_orig_mod" in each._modules or each._compiled_call_impl is not None for each in modules)  # noqa: SLF001

"""The examination of the run in which a hook found a NaN, when the same runs are made again.

The loop begins with the newest checkpoint before that run, and makes the same runs: they have the same bits. In the
last of them, from ``_WATCHED`` runs before, every operator and every module is watched. What is found goes into a
folder, ``nan-81234/``, which :mod:`torchhooks.autopsy.report` writes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol, cast

import torch

from torchhooks.autopsy import request as requests
from torchhooks.autopsy.figures import Figures, has_numbers, not_finite, part_of, tensors_in
from torchhooks.autopsy.modules import Modules
from torchhooks.autopsy.operations import Operations, Origin
from torchhooks.autopsy.report import Gradients, Report, began_before, write_report
from torchhooks.checkpoints.gradients import register_step_post_hook
from torchhooks.checkpoints.saver import Saver
from torchhooks.checkpoints.sharded import canonical
from torchhooks.common.errors import brief
from torchhooks.common.log import logger
from torchhooks.common.timers import NEVER, Due
from torchhooks.device.readback import to_host
from torchhooks.fetches.fetch import named_outputs
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.lifecycle.session import Session

_WATCHED = 5  # runs before the one in question, in which a parameter may have become what shows in the loss later


class Finder(Protocol):
    """A hook that can ask for an autopsy."""

    examined: Any
    """The fetch that it looks at."""

    def why_examined(self, step: int, value: Any) -> str | None:
        """Return what is wrong with ``value``, which is on the host, at ``step``; ``None`` if nothing is."""


class Examination(SessionRunHook):
    """Watches the runs up to the one that ``request`` is about, and reports on it.

    The first hook of the loop, so that it has reported when the hook that found the NaN ends the loop.

    Args:
        request: what ``nan.json`` contains.
        finder: the hook that wrote it, in this process.
        counts_runs: whether each run makes one global step.
    """

    def __init__(self, request: requests.Request, finder: SessionRunHook, counts_runs: bool) -> None:
        self._request = request
        self._finder = cast(Finder, finder)
        self._counts_runs = counts_runs
        self._step: int = request["step"]
        self._first = self._step - _WATCHED
        self._watch = ExitStack()
        self._is_over = False
        self._begun_watch = False

    def __repr__(self) -> str:
        return f"the autopsy of step {self._step}"

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._watch.close()
        self._session = session
        self._report = Report(self._request)
        self._report.restored_step = session.global_step
        self._modules = Modules(session.model, self._paused)
        self._operations = Operations(self._modules.path, self._is_made)
        self._is_over = session.global_step >= self._step
        self._optimizer_steps = 0
        self._is_kept = False
        self._gradients: Gradients = {}
        if not self._is_over:
            self._report.broken_at_start = not_finite(_named_state(session))
            logger.warning(
                "%s, says %s: the runs from step %d on are made again, to find out where it came from",
                *(self._request["message"], requests.NAME, session.global_step),
            )

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        session = run_context.session
        step = session.global_step + 1
        if step < self._first:
            return None
        is_last = step >= self._step
        if is_last and not self._is_kept:
            self._is_kept = True
            self._keep(run_context, step)
        compiled = _uses_compiler(session.model)
        self._begin(run_context, step, compiled, is_last)
        return SessionRunArgs(self._finder.examined) if is_last or self._request["kind"] != "state" else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        step = session.global_step
        if not self._begun_watch:
            self._note_state(f"since step {step}")
            return
        raw, outputs = run_values.results, session.outputs
        self._end()
        value = to_host(raw)
        gradients = self._gradients or _gradients(session)
        self._report.add_run(step, session, value, gradients, self._optimizer_steps, self._modules.calls)
        self._note_state(f"since step {step}")
        problem = self._problem(step, raw, value)
        problems = session.ranks.gather(problem, "an autopsy")
        is_past = step > self._step or (step == self._step and self._counts_runs)
        if any(each is not None for each in problems) or is_past:
            self._report.origin = self._origin(raw, outputs)
            self._conclude(session, run_context, step, problem, problems, outputs)

    def teardown(self) -> None:
        begun, self._begun_watch = self._begun_watch, False
        self._watch.close()
        if self._is_over or not hasattr(self, "_session"):
            return
        # Not after a Ctrl-C, which leaves whatever the step was in the middle of.
        self._report.origin = self._alive() if begun and isinstance(sys.exception(), Exception) else None
        if self._report.origin is None:
            logger.warning(
                "no autopsy was made: the loop ended at step %d, before step %d",
                *(self._session.global_step, self._step),
            )
            return
        # The step raised an error, as an assertion of the script does. The other ranks may not be there.
        self._report.notes.append("The step did not return, so the cause is the first of what was not finite by then.")
        self._report.modules, self._report.kinds = self._modules.calls, self._modules.kinds
        self._report.step = self._session.global_step + 1
        self._report.problem = "the step raised an error"
        self._finish([self._report.to_save(self._session)], self._session)

    def next_due(self) -> Due | None:
        return NEVER if self._is_over else None

    # -- watching -----------------------------------------------------------------------------------------------------

    def _begin(self, run_context: SessionRunContext, step: int, compiled: bool, is_last: bool) -> None:
        session = run_context.session
        self._begun_watch, self._gradients, self._optimizer_steps = True, {}, 0
        optimizer: Any = session.optimizer
        if hasattr(optimizer, "register_step_pre_hook"):
            self._watch.callback(optimizer.register_step_pre_hook(self._optimizer_begins).remove)
            self._watch.callback(register_step_post_hook(optimizer, self._optimizer_ends).remove)
        self._modules.calls = []
        state = _named_state(session, with_optimizer=is_last)
        self._report.parameters = {name: Figures(tensor) for name, tensor in state}
        if compiled and not is_last:
            return  # compiled code is not seen, and would be another code if it were
        if compiled:
            self._report.eager = True
            self._watch.enter_context(torch.compiler.set_stance("force_eager"))
        self._report.watched_from = self._report.watched_from or step
        self._modules.open()
        self._watch.callback(self._modules.close)
        inputs = [(f"input {name}", value) for name, value in run_context.inputs().items()]
        if not inputs and session.position is not None:
            inputs = [("item", session.position.current_item)]
        named = [
            (_numbered(name, index), each) for name, value in inputs for index, each in enumerate(tensors_in(value))
        ]
        self._operations.begin(step, _named_state(session), named)
        self._made_at = step
        self._watch.enter_context(self._operations)

    def _end(self) -> None:
        self._watch.close()
        self._begun_watch = False

    def _is_made(self) -> bool:
        return self._counts_runs and self._session.global_step >= self._made_at

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        before, self._operations.is_paused = self._operations.is_paused, True
        try:
            yield
        finally:
            self._operations.is_paused = before

    def _optimizer_begins(self, *_: Any) -> None:
        with self._paused():
            self._gradients = _gradients(self._session)

    def _optimizer_ends(self, *_: Any) -> None:
        self._optimizer_steps += 1

    def _note_state(self, when: str) -> None:
        """Note the first parameters and buffers that are not finite and were at the start, and when that was found."""
        if self._report.broken is None:
            bad = not_finite(_named_state(self._session))
            new = [name for name in bad if name not in self._report.broken_at_start]
            if new:
                self._report.broken = {"when": when, "step": self._session.global_step, "names": new}

    def _keep(self, run_context: SessionRunContext, step: int) -> None:
        """Save the state before the run, and what the run gets."""
        session, folder = run_context.session, self._folder(step)
        try:
            os.makedirs(folder, exist_ok=True)
            Saver().save(session, os.path.join(folder, "model.ckpt"), step - 1)
            self._report.has_state = True
            self._report.batch = _save_batch(run_context, folder)
        except Exception as error:
            self._report.notes.append(f"The state before the step was not saved: {brief(error)}")

    def _folder(self, step: int) -> str:
        assert self._session.checkpoint_dir is not None
        return requests.folder_of(self._session.checkpoint_dir, step)

    def _problem(self, step: int, raw: Any, value: Any) -> str | None:
        """Return what is wrong after ``step``, whose value is ``raw``, and ``value`` on the host."""
        if self._request["kind"] == "state":
            broken = self._report.broken
            return None if broken is None else f"{broken['names'][0]} is not finite after step {step}"
        return None if raw is None else self._finder.why_examined(step, value)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _alive(self) -> Origin | None:
        """Return the origin of what was not finite when the step raised an error."""
        found = self._operations.read or self._operations.first_alive()
        is_nan = found is not None and (found.kind == "NaN" or found.became_nan is not None)
        # In an earlier step, the infinities of a mask say nothing about an error such as that of a full device.
        return found if is_nan or self._session.global_step + 1 >= self._step else None

    def _origin(self, raw: Any, outputs: Any) -> Origin | None:
        """Return the origin of the value in question, or else of what is not finite after the step."""
        operations, session = self._operations, self._session
        grads = [] if session.model is None else [each.grad for each in session.model.parameters()]
        for value in (raw, outputs, grads, [tensor for _, tensor in _named_state(session)]):
            found = operations.origin_of(value)
            if found is not None:
                return found
        return operations.read

    def _conclude(
        self,
        session: Session,
        run_context: SessionRunContext,
        step: int,
        problem: str | None,
        problems: list[str | None],
        outputs: Any,
    ) -> None:
        report = self._report
        report.step, report.problem = step, problem
        report.came_back = any(each is not None for each in problems)
        report.modules, report.kinds = self._modules.calls, self._modules.kinds
        report.outputs = {name: to_host(value) for name, value in named_outputs(outputs).items()}
        report.digests = requests.digests(session, step, run_context.inputs())
        report.environment = requests.environment(session)
        report.unreadable = self._operations.unreadable
        self._finish(session.ranks.gather(report.to_save(session), "the report of an autopsy"), session)

    def _finish(self, ranks: list[dict[str, Any]], session: Session) -> None:
        self._is_over = True
        session.examined_step = self._report.step
        folder = self._folder(self._report.step)
        if session.ranks.is_chief or len(ranks) < session.ranks.size:
            try:
                report = write_report(folder, ranks, self._request)
                checkpoint_dir, earlier = os.path.dirname(folder), began_before(report)
                requests.put_aside(checkpoint_dir, self._request)
                if earlier is not None:
                    requests.write_json(os.path.join(checkpoint_dir, requests.NAME), {**self._request, **earlier})
            except OSError as error:
                logger.warning("the report of the autopsy was not written into %s: %s", folder, brief(error))


def _numbered(name: str, index: int) -> str:
    return f"{name}[{index}]" if index else name


def _named_state(session: Session, with_optimizer: bool = True) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that stay from run to run, by name: parameters, buffers, and the state of the optimizer."""
    found: list[tuple[str, torch.Tensor]] = []
    names: dict[int, str] = {}
    if session.model is not None:
        for name, parameter in session.model.named_parameters():
            names[id(parameter)] = canonical(name)
            found.append((f"parameter {canonical(name)}", parameter))
        found += [(f"buffer {canonical(name)}", each) for name, each in session.model.named_buffers()]
    for parameter, state in getattr(session.optimizer, "state", {}).items() if with_optimizer else ():
        owner = names.get(id(parameter), "a parameter that the model does not have")
        found += [(f"{key} of {owner}", each) for key, each in state.items() if isinstance(each, torch.Tensor)]
    return [(name, each) for name, each in found if has_numbers(part_of(each))]


def _gradients(session: Session) -> Gradients:
    """Return the norm of each gradient that the optimizer has, of this rank's part, by the name of its parameter."""
    names = {} if session.model is None else {id(each): name for name, each in session.model.named_parameters()}
    found: Gradients = {}
    for number, parameter in enumerate(_parameters(session.optimizer)):
        grad = parameter.grad
        if grad is not None and not grad.is_sparse and grad.numel():
            name = canonical(names.get(id(parameter), f"parameter {number}"))
            found[name] = torch.linalg.vector_norm(part_of(grad).detach())
    return found


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]


def _uses_compiler(model: torch.nn.Module | None) -> bool:
    """Return whether code of this process was compiled by ``torch.compile``, or code of ``model`` is to be."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["frames"].get("ok"):
        return True
    modules = [] if model is None else [*model.modules()]
    return any("_orig_mod" in each._modules or each._compiled_call_impl is not None for each in modules)  # noqa: SLF001


def _save_batch(run_context: SessionRunContext, folder: str) -> dict[str, Any]:
    """Write what the run gets to ``batch.pt``, and return what to say of that file."""
    session = run_context.session
    batch: Any = run_context.inputs()
    what = "the arguments of the step, by name"
    if not batch and session.position is not None:
        batch, what = session.position.current_item, "the item of the innermost until_stop"
    name = "batch.pt" if session.ranks.is_chief else f"batch-{session.ranks.rank}.pt"
    path = os.path.join(folder, name)
    try:
        torch.save(batch, path)
    except Exception as error:
        return {"missing": f"it cannot be saved: {brief(error)}"}
    try:
        torch.load(path, weights_only=True, map_location="cpu")
    except Exception:
        return {"file": name, "what": what, "weights_only": False}
    return {"file": name, "what": what, "weights_only": True}

"""The examination of the run in which a hook found a NaN, when the same runs are made again.

The flow: a hook finds a NaN, and the extension of the autopsy calls :func:`torchhooks.tools.autopsy.request.leave`. In
the next process it calls :func:`with_examination`, which says from which checkpoint to begin, and with which hooks: an
:class:`Examination`, which is called before the others, and its ``last``, which is called after them. The same runs are
made again, with the same bits. From ``_WATCHED`` runs before the one in question, a
:class:`torchhooks.tools.autopsy.watching.RunWatcher` looks at every operator and every module, and what each run gets is
kept until the cause is known. What is found goes into a folder, ``nan-81234/``, which
:mod:`torchhooks.tools.autopsy.report` writes.

An error of the examination is none of the training run: it ends the examination, which is not made again.
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import BinaryIO, TypeVar

import torch

from torchhooks.checkpoints.folder import STATE, Checkpoint, inspect, list_checkpoints, verify
from torchhooks.checkpoints.reading import load_file
from torchhooks.checkpoints.saver import Saver
from torchhooks.common.errors import DamagedCheckpointError, PeerError, brief
from torchhooks.common.files import Disk
from torchhooks.common.log import logger
from torchhooks.common.timers import NEVER, Due
from torchhooks.device.readback import to_host
from torchhooks.fetches.names import Value, named_outputs
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.extension import LoopPlan
from torchhooks.lifecycle.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues, StandardHook
from torchhooks.lifecycle.session import Session
from torchhooks.tools.autopsy import request as requests
from torchhooks.tools.autopsy.figures import has_numbers, is_finite, not_finite, tensors_in
from torchhooks.tools.autopsy.operations import Origin
from torchhooks.tools.autopsy.report import (
    BatchFile,
    BrokenState,
    Report,
    earlier_request,
    lines_of,
    plain,
    report_of_cause,
    write_report,
)
from torchhooks.tools.autopsy.watching import RunInputs, Watch, named_state

T = TypeVar("T")

_WATCHED = 5  # runs before the one in question, in which a parameter may have become what shows in the loss later
_MOST_ATTEMPTS = 2  # of processes that ended before they had looked at the step, because of the watching or not


def with_examination(plan: LoopPlan) -> LoopPlan:
    """Return ``plan``, changed as the request in its folder wants it; unchanged if there is nothing to examine."""
    assert plan.folder is not None
    try:
        request = requests.read_request(plan.folder)
    except ValueError as error:
        logger.warning("no autopsy: %s", error)
        return plan
    if request is None:
        return plan
    try:
        return _with_examination(plan, plan.folder, request)
    except Exception as error:
        logger.warning("no autopsy: %s, which is put aside, cannot be followed", requests.NAME, exc_info=error)
        requests.give_up(plan.folder, request, brief(error))
        return plan


def _with_examination(plan: LoopPlan, folder: str, request: requests.Request) -> LoopPlan:
    examined, step = requests.examined_hooks(plan.hooks), request.step
    if not examined:
        return plan
    if request.attempts >= _MOST_ATTEMPTS:
        why = f"{request.attempts} processes began to look at step {step}, and ended before it"
        logger.warning("no autopsy of step %d: %s. No further one tries", step, why)
        requests.give_up(folder, request, why)
        _remove_kept(requests.folder_of(folder, step))
        return plan
    finder = examined.get(request.hook)
    if finder is None:
        logger.warning(
            "no autopsy of step %d: %s is from %s, which the loop does not have. Remove the file, or put the hook back",
            *(step, requests.NAME, request.hook),
        )
        return plan
    checkpoint = plan.checkpoint
    if checkpoint is None:
        found = _checkpoint_before(folder, step)
        checkpoint, is_before = (None, not list_checkpoints(folder)) if found is None else (found.name, True)
    else:
        is_before = inspect(os.path.join(folder, checkpoint)).step < step
    if not is_before:
        logger.warning(
            "no autopsy of step %d, about which %s is: %s has no checkpoint before it to begin with",
            *(step, requests.NAME, folder if checkpoint is None else checkpoint),
        )
        return plan
    examination = Examination(request, finder, plan.counts_runs)
    first, last = (examination, *plan.first), (*plan.last, examination.last)
    return replace(plan, checkpoint=checkpoint, first=first, last=last)


def _checkpoint_before(folder: str, step: int) -> Checkpoint | None:
    """Return the newest undamaged checkpoint in ``folder`` of a step before ``step``; ``None`` if there is none.

    One with a model that is not finite comes last: what made it so comes before it.
    """
    broken = None
    for checkpoint in reversed(list_checkpoints(folder)):
        if checkpoint.step < step:
            try:
                verify(checkpoint.path)
                if _has_finite_model(checkpoint.path):
                    return checkpoint
            except DamagedCheckpointError as error:
                logger.warning("%s It is skipped.", error)
            else:
                broken = broken or checkpoint
    return broken


def _has_finite_model(path: str) -> bool:
    """Return whether the model in the checkpoint at ``path`` is finite, as far as it is in one file."""
    if "model" not in (saved := load_file(path) if os.listdir(path).count(STATE) else {}):
        return True
    return all(is_finite(tensor) for tensor in tensors_in(saved["model"]) if has_numbers(tensor))


class _Disk(Disk):
    """Does not wait for the disk: what is kept for some runs need not survive a power failure."""

    def sync(self, file: BinaryIO) -> None:
        file.flush()

    def sync_folder(self, path: str) -> None: ...


@dataclass
class _Kept:
    """What is kept of a run until the cause is known."""

    checkpoint: str | None = None
    """The path of the state before the run."""
    batch: bytes | None = None
    """The file with what the run gets, as it was before the run."""
    what: str = ""
    """What is in that file."""
    problem: str = ""
    """Why there is none."""


class Examination(SessionRunHook):
    """Watches the runs up to the one that ``request`` is about, and reports on it.

    The first hook of the loop, so that it has reported when the hook that found the NaN ends the loop.

    Args:
        request: what ``nan.json`` contains.
        finder: the hook that wrote it, in this process.
        counts_runs: whether each run makes one global step.
    """

    def __init__(self, request: requests.Request, finder: StandardHook, counts_runs: bool) -> None:
        self._request, self._finder, self._counts_runs = request, finder, counts_runs
        self._session: Session | None = None
        self._watch: Watch | None = None
        self._is_over = self._is_watching = self._is_counted = False
        self._raw: Value = None
        self.last = _LastHook(self)
        """The hook that is to be called after all others."""

    def __repr__(self) -> str:
        return f"the autopsy of step {self._request.step}"

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        request = self._request
        if self._watch is not None:  # of a session that failed in a run, from which the loop recovers
            self._watch.close()
        self._session, self._watch = session, Watch(session, self._counts_runs, self._attempt)
        session.on_error(self._run_failed)
        self._report = Report(
            request=request, step=request.step, rank=session.ranks.rank, restored_step=session.global_step
        )
        self._kept: list[_Kept] = []
        self._needed: set[int | None] = set()
        self._error: Exception | None = None
        self._is_over = session.global_step >= request.step
        if not self._is_over:
            self._report.not_finite_at_start = self._attempt(lambda: not_finite(named_state(session))) or []
            logger.warning(
                "%s, says %s: the runs from step %d on are made again, to find out where it came from",
                *(request.message, requests.NAME, session.global_step),
            )

    def next_due(self) -> Due | None:
        return NEVER if self._is_over else None

    def _attempt(self, call: Callable[..., T], *args: object) -> T | None:
        """Return the result of ``call``; ``None`` after an error, after which no other call is made."""
        assert self._watch is not None
        if self._error is None:
            try:
                return call(*args)
            except Exception as error:
                self._error = error
                self._watch.operations.is_paused = True
        return None

    # -- the runs -----------------------------------------------------------------------------------------------------

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        step = run_context.session.global_step + 1
        self._is_watching = step >= self._request.step - _WATCHED
        if not self._is_watching:
            return None
        is_last = step >= self._request.step
        self._attempt(self._count)
        self._save_state(run_context.session)
        self._attempt(self._begin, run_context, is_last)
        wants_value = is_last or self._request.kind != requests.BROKEN_STATE
        return SessionRunArgs(self._finder.examined) if wants_value else None

    def _count(self) -> None:
        """Note that this process has begun to watch, in case that it ends because of it."""
        assert self._session is not None
        if not self._is_counted and self._session.ranks.is_chief:
            self._is_counted = True
            _remove_kept(self._folder)
            counted = replace(self._request, attempts=self._request.attempts + 1)
            requests.write_json(os.path.join(self._checkpoint_dir, requests.NAME), counted)

    def _save_state(self, session: Session) -> None:
        """Save the state before the run, on all ranks together, whatever has failed on this one."""
        self._kept.append(kept := _Kept())
        path = os.path.join(self._folder, f".run-{len(self._kept)}", "model.ckpt")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            saver = Saver()
            saver.disk = _Disk()
            kept.checkpoint = saver.save(session, path, session.global_step)
        except Exception as error:
            self._report.notes.append(f"The state before step {session.global_step + 1} was not saved: {brief(error)}")

    def _begin(self, run_context: SessionRunContext, is_last: bool) -> None:
        assert self._watch is not None
        inputs, kept = RunInputs.of(run_context), self._kept[-1]
        kept.what = inputs.what
        try:
            torch.save(inputs.batch, file := io.BytesIO())
            kept.batch = file.getvalue()
        except Exception as error:
            kept.problem = f"it cannot be saved: {brief(error)}"
        self._watch.begin(inputs, is_last)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._raw = run_values.results
        if self._is_watching and self._request.kind == requests.NAN:
            self._conclude(run_context)

    def after_all(self, run_context: SessionRunContext) -> None:
        """End the run, for which all other hooks were called."""
        if self._is_watching and self._request.kind == requests.BROKEN_STATE:
            self._conclude(run_context)
        if not self._is_over:
            self._attempt(self._end_run, run_context.session)

    def _end_run(self, session: Session) -> None:
        assert self._watch is not None
        if self._is_watching:
            self._watch.end(session.global_step)
        self._note_state()
        if self._is_watching:
            self._needed = {*self._watch.operations.runs_of_values(), self._broken_run()}

    def _conclude(self, run_context: SessionRunContext) -> None:
        """Report, if this is the run in question, or if the examination has failed on any rank."""
        session, watch, raw = run_context.session, self._watch, self._raw
        assert watch is not None
        with watch.paused():
            problem = self._attempt(self._problem, session, raw)
            found = session.ranks.gather((problem, self._failure(), self._needed), "an autopsy")
            self._remove_states({number for _, _, needed in found for number in needed})
            is_past = session.global_step >= self._request.step + (not self._counts_runs)
            came_back = any(each is not None for each, _, _ in found)
            failed = [(rank, text) for rank, (_, text, _) in enumerate(found) if text is not None]
            if not failed and (came_back or is_past):
                self._attempt(self._complete, session, raw, came_back, run_context.inputs())
                self._report.problem = problem
                ended = session.ranks.gather(self._failure() or self._report, "the report of an autopsy")
                failed = [(rank, text) for rank, text in enumerate(ended) if isinstance(text, str)]
                if not failed:
                    self._attempt(self._write, [each for each in ended if isinstance(each, Report)])
                    failed = [] if self._error is None else [(session.ranks.rank, self._failure() or "")]
            if failed:
                self._give_up(*failed[0])

    def _problem(self, session: Session, raw: Value) -> str | None:
        """Return what is wrong after the step that is made, whose value is ``raw``."""
        value = to_host(raw)
        assert self._watch is not None
        assert self._watch.run is not None  # before_run began it, or this is not called
        self._watch.run.value = plain(value)
        if self._request.kind == requests.NAN:
            return None if raw is None else self._finder.why_examined(session.global_step, value)
        self._note_state()
        broken = self._report.not_finite_first
        return None if broken is None else f"{broken.names[0]} is not finite after step {session.global_step}"

    def _note_state(self) -> None:
        """Note the first parameters and buffers that are not finite, and were at the start."""
        session = self._session
        assert session is not None
        if self._report.not_finite_first is None:
            bad = not_finite(named_state(session))
            new = [name for name in bad if name not in self._report.not_finite_at_start]
            if new:
                step = session.global_step
                self._report.not_finite_first = BrokenState(step=step, when=f"since step {step}", names=new)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _complete(self, session: Session, raw: Value, came_back: bool, inputs: dict[str, Value]) -> None:
        """Fill the report of this rank, after the run in question."""
        report, watch, outputs = self._report, self._watch, session.outputs
        assert watch is not None
        report.came_back = came_back
        report.origin = self._origin(session, raw, outputs)
        watch.end(session.global_step)
        self._note_state()
        report.outputs = {name: plain(to_host(output)) for name, output in named_outputs(outputs).items()}
        report.digests = requests.digests(session, session.global_step, inputs)
        report.environment = requests.environment(session)
        self._fill(session.global_step)

    def _fill(self, step: int) -> None:
        report, watch = self._report, self._watch
        assert watch is not None
        report.step, report.runs, report.eager, report.watched_from = step, watch.runs, watch.eager, watch.watched_from
        if report.origin is not None:
            report.run = report.origin.run
        if (report.origin is None or report.origin.phase == "before") and self._broken_run() is not None:
            report.run = self._broken_run() or 0
        report.batch_file = _about_batch(self._kept[report.run], report.rank)
        if watch.operations.unreadable:
            report.notes.append(f"The results of {watch.operations.unreadable} operators could not be looked at.")

    def _broken_run(self) -> int | None:
        """Return the number of the run in which the state broke, as of compiled code, which cannot be watched."""
        assert self._watch is not None
        broken = self._report.not_finite_first
        steps = [run.step for run in self._watch.runs]
        return steps.index(broken.step) if broken is not None and broken.step in steps else None

    def _origin(self, session: Session, raw: Value, outputs: Value) -> Origin | None:
        """Return the origin of the value in question, or else of what is not finite after the step."""
        assert self._watch is not None
        operations = self._watch.operations
        for value in (raw, outputs):
            if (found := operations.origin_of(value)) is not None:
                return found
        if (found := operations.read()) is not None:  # the step has made a number of it
            return found
        grads = [] if session.model is None else [parameter.grad for parameter in session.model.parameters()]
        return operations.origin_of(grads) or operations.origin_of([each for _, each in named_state(session)])

    def teardown(self) -> None:
        session, watch = self._session, self._watch
        if session is None or watch is None:
            return
        watch.close()
        if self._is_over:
            return
        self._attempt(self._end_early, session)
        if self._error is not None:
            self._give_up(session.ranks.rank, self._failure() or "")

    def _end_early(self, session: Session) -> None:
        """Say that there is no report."""
        logger.warning(
            "no autopsy was made: the loop ended at step %d, before step %d",
            *(session.global_step, self._request.step),
        )
        if session.ranks.is_chief and self._is_counted:
            _remove_kept(self._folder)
            if not isinstance(session.failure, Exception):  # the watching has not ended the loop
                requests.write_json(os.path.join(self._checkpoint_dir, requests.NAME), self._request)

    def _run_failed(self, error: BaseException) -> None:
        """Report on the run that raised ``error``, as an assertion of the script does, if something was not finite.

        Called at once: what the frames of the error refer to is gone when the script has caught it.
        """
        session, watch = self._session, self._watch
        assert session is not None
        assert watch is not None
        if watch.run is None or self._is_over:
            return
        # Not after a Ctrl-C, which leaves whatever the step was in the middle of.
        origin = self._attempt(self._origin_of_error, session, watch, error) if isinstance(error, Exception) else None
        if origin is not None:
            self._attempt(self._report_error, session, watch, origin)
        else:  # the script may catch the error, and go on
            self._attempt(watch.end, watch.run.step)
        watch.close()

    def _report_error(self, session: Session, watch: Watch, origin: Origin) -> None:
        report = self._report
        report.origin = origin
        report.notes.append("The step did not return, so the cause is the first of what was not finite by then.")
        step = session.global_step + 1
        watch.end(step)
        self._fill(step)
        report.problem = "the step raised an error"
        self._write([report])

    def _origin_of_error(self, session: Session, watch: Watch, error: Exception) -> Origin | None:
        found = watch.operations.read() or watch.operations.first_alive()
        is_nan = found is not None and (found.kind == "NaN" or found.became_nan is not None)
        # The infinities of a mask say nothing about an error such as that of a full device, or of another rank.
        is_own = session.global_step + 1 >= self._request.step and not isinstance(error, PeerError)
        return found if is_nan or is_own else None

    def _write(self, reports: list[Report]) -> None:
        """Write the report, put ``nan.json`` aside, and ask the next process to look further back if that is needed.

        ``reports`` are those of all ranks. After an error of the step, the other ranks may not be there, so that each
        writes its own.
        """
        session = self._session
        assert session is not None
        self._is_over = True
        requests.note_examined(session, self._report.step)
        is_gathered, rank = len(reports) == session.ranks.size, session.ranks.rank
        suffix = f"-{rank}" if rank else ""
        report = report_of_cause(reports)
        kept = self._kept[report.run]
        path = os.path.join(self._folder, f"report{'' if is_gathered else suffix}.md")
        report.state = None if kept.checkpoint is None else os.path.basename(kept.checkpoint)
        report.lines = lines_of(report, path)
        is_writer, is_written = session.ranks.is_chief or not is_gathered, False
        try:
            os.makedirs(self._folder, exist_ok=True)
            if kept.batch is not None:
                requests.write(os.path.join(self._folder, f"batch{suffix}.pt"), kept.batch)
            if is_writer:
                with requests.alone_in(self._checkpoint_dir):
                    self._move_state(kept, is_gathered)
                    write_report(path, report)
                    requests.put_aside(self._checkpoint_dir, self._request)
                    if (earlier := earlier_request(report)) is not None:
                        requests.write_json(os.path.join(self._checkpoint_dir, requests.NAME), earlier)
            is_written = True
        except OSError as error:
            logger.warning("the report of the autopsy was not written into %s: %s", self._folder, brief(error))
        for line in report.lines[: None if is_written else -1] if is_writer else ():  # the last one is where it is
            logger.warning("%s", line)

    def _move_state(self, kept: _Kept, is_gathered: bool) -> None:
        """Put the state before the run next to the report, and remove what else was kept."""
        if kept.checkpoint is not None and os.path.isdir(kept.checkpoint):  # another rank may have moved it
            place = os.path.join(self._folder, os.path.basename(kept.checkpoint))
            _remove(place)
            os.replace(kept.checkpoint, place)
        if is_gathered:
            _remove_kept(self._folder)

    def _failure(self) -> str | None:
        error = self._error
        return None if error is None else "".join(traceback.format_exception(error))

    def _give_up(self, rank: int, why: str) -> None:
        """End the examination, which has failed on ``rank``, and have no other process make it."""
        session, watch = self._session, self._watch
        assert session is not None
        assert watch is not None
        self._is_over = True
        watch.close()
        requests.note_examined(session, self._request.step)
        where = f" on rank {rank}" if session.ranks.size > 1 else ""
        logger.warning(
            "the autopsy of step %d has failed%s. The training run goes on, and the step is not examined again",
            *(self._request.step, where),
            exc_info=self._error,
        )
        if session.ranks.is_chief:
            _remove_kept(self._folder)
            requests.give_up(self._checkpoint_dir, self._request, why)

    # -- files --------------------------------------------------------------------------------------------------------

    @property
    def _checkpoint_dir(self) -> str:
        assert self._session is not None
        assert self._session.checkpoint_dir is not None
        return self._session.checkpoint_dir

    @property
    def _folder(self) -> str:
        return requests.folder_of(self._checkpoint_dir, self._request.step)

    def _remove_states(self, needed: set[int | None]) -> None:
        """Remove what was kept of the runs before this one, but for those that are ``needed`` on any rank."""
        for number, kept in enumerate(self._kept[:-1]):
            if number not in needed and kept.checkpoint is not None:
                _remove(os.path.dirname(kept.checkpoint))
                kept.checkpoint = None


class _LastHook(SessionRunHook):
    """Tells the examination that all other hooks were called for a run."""

    def __init__(self, examination: Examination) -> None:
        self._examination = examination

    def __repr__(self) -> str:
        return repr(self._examination)

    def next_due(self) -> Due | None:
        return self._examination.next_due()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._examination.after_all(run_context)


def _remove_kept(folder: str) -> None:
    """Remove what was kept of the runs in the folder of a report, also by a process that was killed."""
    for path in glob.glob(os.path.join(glob.escape(folder), ".run-*")):
        _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path)


def _about_batch(kept: _Kept, rank: int) -> BatchFile:
    """Return what to say of ``batch.pt``, the file of what the run got."""
    if kept.batch is None:
        return BatchFile(missing=kept.problem)
    try:
        torch.load(io.BytesIO(kept.batch), weights_only=True, map_location="cpu")
        is_plain = True
    except Exception:
        is_plain = False
    return BatchFile(file=f"batch-{rank}.pt" if rank else "batch.pt", what=kept.what, weights_only=is_plain)

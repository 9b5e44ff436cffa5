"""The examination of the run in which a hook found a NaN, when the same runs are made again.

The flow: a hook finds a NaN, and the extension of the autopsy calls :func:`torchhooks.tools.autopsy.request.leave`. In
the next process it calls :func:`with_examination`, which says from which checkpoint to begin, and with which hooks: an
:class:`ExaminationHook`, which is called before the others, and its ``last``, which is called after them. The same runs
are made again, with the same bits. From ``_WATCHED`` runs before the one in question, a ``RunWatcher`` looks at every
operator and every module, and what each run gets is kept until the cause is known. What is found goes into a folder,
``nan-81234/``, which :mod:`torchhooks.tools.autopsy.report` writes.

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
from typing import Any, BinaryIO, TypeVar

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
from torchhooks.tools.autopsy.watching import RunInputs, RunWatcher, named_state

T = TypeVar("T")

_WATCHED = 5  # runs before the one in question, in which a parameter may have become what shows in the loss later
_MOST_ATTEMPTS = 2  # of processes that ended before they had looked at the step, because of the watching or not


def with_examination(plan: LoopPlan, folder: str) -> LoopPlan:
    """Return ``plan``, changed as the request in ``folder`` wants it; unchanged if there is nothing to examine."""
    try:
        request = requests.read_request(folder)
    except ValueError as error:
        # The file stays where it is. The message asks a person to remove it, and the next request replaces it.
        logger.warning("no autopsy: %s", error)
        return plan
    if request is None:
        return plan
    try:
        return _with_examination(plan, folder, request)
    except Exception as error:
        # A property of the script's hook may raise here, in the constructor of the loop, which must not fail because of
        # that. The request is put aside, so that no later process meets the same error.
        logger.warning("no autopsy: %s, which is put aside, cannot be followed", requests.NAME, exc_info=error)
        requests.give_up(folder, request, brief(error))
        return plan


def _with_examination(plan: LoopPlan, folder: str, request: requests.Request) -> LoopPlan:
    examined, step = requests.examined_hooks(plan.all_hooks), request.step
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
    hook = ExaminationHook(request, finder, folder, plan.counts_runs)
    # Around the hooks that other extensions add, too. The first one reports before the hook that found the NaN ends
    # the loop, and the last one sees what all other hooks have changed.
    first, last = (hook, *plan.first), (*plan.last, hook.last)
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


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """What a run gets, kept until the cause is known."""

    data: bytes | None
    """The file, with the values from before the run."""
    what: str
    """What is in that file."""
    problem: str = ""
    """Why there is none."""


class ExaminationHook(SessionRunHook):
    """Examines the runs up to the one that ``request`` is about, in each session of the loop.

    The first hook of the loop, so that it has reported when the hook that found the NaN ends the loop.

    Args:
        request: what ``nan.json`` contains.
        finder: the hook that wrote it, in this process.
        folder: the ``checkpoint_dir`` of the loop.
        counts_runs: whether each run makes one global step.
    """

    def __init__(self, request: requests.Request, finder: StandardHook, folder: str, counts_runs: bool) -> None:
        self._request, self._finder, self._counts_runs = request, finder, counts_runs
        self._folder = os.path.abspath(folder)  # a script may change the current directory while it trains
        self._examination: Examination | None = None
        self.last = _LastHook(self)
        """The hook that is to be called after all others."""

    def __repr__(self) -> str:
        return f"the autopsy of step {self._request.step}"

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        failed = self._examination
        if failed is not None:  # of a session from which the loop recovers
            failed.close()
        # A recovery makes another session in the same process. That is not another attempt, so it is not counted again.
        self._examination = examination = Examination(
            session,
            self._request,
            self._finder,
            self._folder,
            counts_runs=self._counts_runs,
            is_counted=failed is not None and failed.is_counted,
        )
        session.on_error(examination.run_failed)

    def next_due(self) -> Due | None:
        return NEVER if self._examination is None or self._examination.is_over else None

    @property
    def _current(self) -> Examination:
        assert self._examination is not None, "no run comes before a session"
        return self._examination

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return self._current.begin_run(run_context)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._current.end_step(run_context, run_values.results)

    def after_all(self, run_context: SessionRunContext) -> None:
        """End the run, for which all other hooks were called."""
        self._current.end_run(run_context)

    def teardown(self) -> None:
        if self._examination is not None:
            self._examination.end()


class _LastHook(SessionRunHook):
    """Tells the examination that all other hooks were called for a run."""

    def __init__(self, first: ExaminationHook) -> None:
        self._first = first

    def __repr__(self) -> str:
        return repr(self._first)

    def next_due(self) -> Due | None:
        return self._first.next_due()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._first.after_all(run_context)


class Examination:
    """The examination of the runs of one session. It is over when the report is written, or when it has failed.

    Args:
        session: the session.
        request: what ``nan.json`` contains.
        finder: the hook that wrote it.
        folder: the ``checkpoint_dir`` of the loop.
        counts_runs: whether each run makes one global step.
        is_counted: whether ``nan.json`` says already that this process has begun to watch.
    """

    def __init__(
        self,
        session: Session,
        request: requests.Request,
        finder: StandardHook,
        folder: str,
        *,
        counts_runs: bool,
        is_counted: bool,
    ) -> None:
        self._session, self._request, self._finder, self._counts_runs = session, request, finder, counts_runs
        self._checkpoint_dir, self._folder = folder, requests.folder_of(folder, request.step)
        self._watcher = RunWatcher(session, counts_runs, self._attempt)
        self._restored_step = session.global_step
        self._states: list[str | None] = []  # the paths of the states before the runs that are watched
        self._batches: list[_Batch] = []
        self._needed: set[int | None] = set()  # the numbers of the runs whose states may be needed
        self._notes: list[str] = []
        self._error: Exception | None = None
        self._is_watching = False  # the run that is made
        self._raw: Value = None
        """The value that the hook looks at, as it was evaluated; :attr:`_value` is what the report has of it."""
        self._value: object = None
        self._not_finite_first: BrokenState | None = None
        self._not_finite_at_start: list[str] = []
        self.is_counted = is_counted
        self.is_over = session.global_step >= request.step
        if not self.is_over:
            self._not_finite_at_start = self._attempt(lambda: not_finite(named_state(session))) or []
            logger.warning(
                "%s, says %s: the runs from step %d on are made again, to find out where it came from",
                *(request.message, requests.NAME, session.global_step),
            )

    def _attempt(self, call: Callable[..., T], *args: object) -> T | None:
        """Return the result of ``call``; ``None`` after an error, after which no other call is made."""
        if self._error is None:
            try:
                return call(*args)
            except Exception as error:
                self._error = error
                self._watcher.operations.stop()
        return None

    # -- the runs -----------------------------------------------------------------------------------------------------

    def begin_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Watch the run that begins, if it is one of the last. Return what is asked of it."""
        step, self._raw, self._value = self._session.global_step + 1, None, None
        self._is_watching = step >= self._request.step - _WATCHED
        if not self._is_watching:
            return None
        is_last = step >= self._request.step
        # Before anything that may end the process, as the memory for watching may: so nan.json has this attempt, also
        # after a kill -9.
        self._attempt(self._count)
        self._save_state()
        self._attempt(self._watch, run_context, is_last)
        wants_value = is_last or self._request.kind != requests.BROKEN_STATE
        return SessionRunArgs(self._finder.examined) if wants_value else None

    def _count(self) -> None:
        """Note that this process has begun to watch, in case that it ends because of it."""
        if not self.is_counted and self._session.ranks.is_chief:
            self.is_counted = True
            _remove_kept(self._folder)
            counted = replace(self._request, attempts=self._request.attempts + 1)
            requests.write_json(os.path.join(self._checkpoint_dir, requests.NAME), counted)

    def _save_state(self) -> None:
        """Save the state before the run, on all ranks together, whatever has failed on this one."""
        session, saved = self._session, None
        path = os.path.join(self._folder, f".run-{len(self._states) + 1}", "model.ckpt")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            saver = Saver()
            saver.disk = _Disk()
            saved = saver.save(session, path, session.global_step)
        except Exception as error:
            self._notes.append(f"The state before step {session.global_step + 1} was not saved: {brief(error)}")
        # Also None, after an error: the number of a run is the index of its state.
        self._states.append(saved)

    def _watch(self, run_context: SessionRunContext, is_last: bool) -> None:
        inputs, data, problem = RunInputs.of(run_context), None, ""
        try:
            # Before the run, because the step may write to its arguments. The bytes stay in memory until it is known
            # which run has the cause.
            torch.save(inputs.batch, file := io.BytesIO())
            data = file.getvalue()
        except Exception as error:
            problem = f"it cannot be saved: {brief(error)}"
        self._batches.append(_Batch(data=data, what=inputs.what, problem=problem))
        self._watcher.begin(inputs, is_last)

    def end_step(self, run_context: SessionRunContext, raw: Value) -> None:
        """Look at ``raw``, the value that :meth:`begin_run` has asked for."""
        self._raw = raw
        # Now, and not in end_run(): the hook that found the NaN raises its error in its after_run, which comes later. A
        # state may be broken by any hook, so end_run() looks for that.
        if self._is_watching and self._request.kind == requests.NAN:
            self._conclude(run_context)

    def end_run(self, run_context: SessionRunContext) -> None:
        """Watch the run no longer, now that all other hooks were called."""
        if self._is_watching and self._request.kind == requests.BROKEN_STATE:
            self._conclude(run_context)
        if not self.is_over:
            self._attempt(self._end_run)

    def _end_run(self) -> None:
        if self._is_watching:
            self._watcher.end(self._session.global_step, self._value)
        self._note_state()
        if self._is_watching:
            self._needed = {*self._watcher.operations.runs_of_values(), self._broken_run()}

    def _conclude(self, run_context: SessionRunContext) -> None:
        """Report, if this is the run in question, or if the examination has failed on any rank."""
        session, step = self._session, self._session.global_step
        with self._watcher.operations.paused():
            # All ranks are here in the same run. Each of them calls gather(), also after an error of its examination,
            # or the others would wait for it.
            problem = self._attempt(self._problem)
            found = session.ranks.gather((problem, self._failure(), self._needed), "an autopsy")
            self._remove_states({number for _, _, needed in found for number in needed})
            is_past = step >= self._request.step + (not self._counts_runs)
            came_back = any(each is not None for each, _, _ in found)
            failed = [(rank, text) for rank, (_, text, _) in enumerate(found) if text is not None]
            if not failed and (came_back or is_past):
                report = self._attempt(self._report_run, problem, came_back, run_context.inputs())
                # The report may fail on one rank alone. All ranks hear of it, so that all of them give up together.
                ended = session.ranks.gather(self._failure() or report, "the report of an autopsy")
                failed = [(rank, text) for rank, text in enumerate(ended) if isinstance(text, str)]
                if not failed:
                    self._attempt(self._write, step, [each for each in ended if isinstance(each, Report)])
                    failed = [] if self._error is None else [(session.ranks.rank, self._failure() or "")]
            if failed:
                self._give_up(*failed[0])

    def _problem(self) -> str | None:
        """Return what is wrong after the step that is made."""
        step, value = self._session.global_step, to_host(self._raw)
        self._value = plain(value)
        if self._request.kind == requests.NAN:
            return None if self._raw is None else self._finder.why_examined(step, value)
        self._note_state()
        broken = self._not_finite_first
        return None if broken is None else f"{broken.names[0]} is not finite after step {step}"

    def _note_state(self) -> None:
        """Note the first parameters and buffers that are not finite, and were at the start."""
        if self._not_finite_first is None:
            new = [name for name in not_finite(named_state(self._session)) if name not in self._not_finite_at_start]
            if new:
                step = self._session.global_step
                self._not_finite_first = BrokenState(step=step, when=f"since step {step}", names=new)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _report_run(self, problem: str | None, came_back: bool, inputs: dict[str, Value]) -> Report:
        """Return the report of this rank on the run in question, which got ``inputs``."""
        session, outputs = self._session, self._session.outputs
        # Before end(), after which the numbers that the script has read in this run count as harmless.
        origin = self._origin(outputs)
        self._watcher.end(session.global_step, self._value)
        self._note_state()
        return self._report(
            session.global_step,
            origin,
            came_back=came_back,
            problem=problem,
            outputs={name: plain(to_host(output)) for name, output in named_outputs(outputs).items()},
            digests=requests.digests(session, session.global_step, inputs),
            environment=requests.environment(session),
        )

    def _report(self, step: int, origin: Origin | None, *notes: str, **known: Any) -> Report:
        """Return the report on the runs up to that of ``step``, which is over, with what else is ``known``."""
        watcher, run = self._watcher, -1 if origin is None else origin.run
        broken_run = self._broken_run()
        if (origin is None or origin.phase == "before") and broken_run is not None:
            run = broken_run
        unreadable = watcher.operations.unreadable
        about = [f"The results of {unreadable} operators could not be looked at."] if unreadable else []
        return Report(
            request=self._request,
            step=step,
            rank=self._session.ranks.rank,
            restored_step=self._restored_step,
            origin=origin,
            run=run,
            runs=watcher.runs,
            eager=watcher.eager,
            watched_from=watcher.watched_from,
            not_finite_at_start=self._not_finite_at_start,
            not_finite_first=self._not_finite_first,
            batch_file=_about_batch(self._batches[run], self._session.ranks.rank),
            notes=[*self._notes, *notes, *about],
            **known,
        )

    def _broken_run(self) -> int | None:
        """Return the number of the run in which the state broke, as of compiled code, which cannot be watched."""
        broken, steps = self._not_finite_first, [run.step for run in self._watcher.runs]
        return steps.index(broken.step) if broken is not None and broken.step in steps else None

    def _origin(self, outputs: Value) -> Origin | None:
        """Return the origin of the value in question, or else of what is not finite after the step."""
        operations, session = self._watcher.operations, self._session
        for value in (self._raw, outputs):
            if (found := operations.origin_of(value)) is not None:
                return found
        if (found := operations.read()) is not None:  # the step has made a number of it
            return found
        grads = [] if session.model is None else [parameter.grad for parameter in session.model.parameters()]
        return operations.origin_of(grads) or operations.origin_of([each for _, each in named_state(session)])

    def close(self) -> None:
        """Watch no run any more."""
        self._watcher.close()

    def end(self) -> None:
        """Watch no run any more, because the loop ends. Say so if there is no report."""
        self.close()
        if not self.is_over:
            self._attempt(self._end_early)
            if self._error is not None:
                self._give_up(self._session.ranks.rank, self._failure() or "")

    def _end_early(self) -> None:
        session, request = self._session, self._request
        logger.warning(
            "no autopsy was made: the loop ended at step %d, before step %d", session.global_step, request.step
        )
        if session.ranks.is_chief and self.is_counted:
            _remove_kept(self._folder)
            if not isinstance(session.failure, Exception):  # the watching has not ended the loop
                requests.write_json(os.path.join(self._checkpoint_dir, requests.NAME), request)

    def run_failed(self, error: BaseException) -> None:
        """Report on the run that raised ``error``, as an assertion of the script does, if something was not finite.

        Called at once: what the frames of the error refer to is gone when the script has caught it.
        """
        watcher = self._watcher
        if watcher.step is None or self.is_over:
            return
        # Not after a Ctrl-C, which leaves whatever the step was in the middle of.
        origin = self._attempt(self._origin_of_error, error) if isinstance(error, Exception) else None
        if origin is not None:
            self._attempt(self._report_error, origin)
        else:  # the script may catch the error, and go on
            self._attempt(watcher.end, watcher.step, self._value)
        watcher.close()

    def _report_error(self, origin: Origin) -> None:
        step = self._session.global_step + 1
        self._watcher.end(step, self._value)
        note = "The step did not return, so the cause is the first of what was not finite by then."
        self._write(step, [self._report(step, origin, note, problem="the step raised an error")])

    def _origin_of_error(self, error: Exception) -> Origin | None:
        operations = self._watcher.operations
        found = operations.read() or operations.first_alive()
        is_nan = found is not None and (found.kind == "NaN" or found.became_nan is not None)
        # The infinities of a mask say nothing about an error such as that of a full device, or of another rank.
        is_own = self._session.global_step + 1 >= self._request.step and not isinstance(error, PeerError)
        return found if is_nan or is_own else None

    def _write(self, step: int, reports: list[Report]) -> None:
        """Write the report, put ``nan.json`` aside, and ask the next process to look further back if that is needed.

        ``reports`` are those of all ranks about ``step``. After an error of the step, the other ranks may not be there,
        so that each writes its own.
        """
        session = self._session
        self.is_over = True
        # Before the hook that found the NaN looks at this step, so that it leaves no request about it.
        requests.note_examined(session, step)
        is_gathered, rank = len(reports) == session.ranks.size, session.ranks.rank
        suffix = f"-{rank}" if rank else ""
        found = report_of_cause(reports)
        state, batch = self._states[found.run], self._batches[found.run]
        path = os.path.join(self._folder, f"report{'' if is_gathered else suffix}.md")
        found = replace(found, state=None if state is None else os.path.basename(state))
        report = replace(found, lines=lines_of(found, path))
        is_writer, is_written = session.ranks.is_chief or not is_gathered, False
        try:
            os.makedirs(self._folder, exist_ok=True)
            if batch.data is not None:
                # Without the lock: the name of this file has the number of the rank.
                requests.write(os.path.join(self._folder, f"batch{suffix}.pt"), batch.data)
            if is_writer:
                # Ranks whose steps raised at once are all here, and move the same state and the same nan.json.
                with requests.alone_in(self._checkpoint_dir):
                    self._move_state(state, is_gathered)
                    # Before nan.json is put aside: after a kill in between, the next process examines the step again.
                    write_report(path, report)
                    requests.put_aside(self._checkpoint_dir, self._request)
                    # After put_aside(), which moves the file of this name.
                    if (earlier := earlier_request(report)) is not None:
                        requests.write_json(os.path.join(self._checkpoint_dir, requests.NAME), earlier)
            is_written = True
        except OSError as error:
            logger.warning("the report of the autopsy was not written into %s: %s", self._folder, brief(error))
        for line in report.lines[: None if is_written else -1] if is_writer else ():  # the last one is where it is
            logger.warning("%s", line)

    def _move_state(self, state: str | None, is_gathered: bool) -> None:
        """Put the state before the run next to the report, and remove what else was kept."""
        if state is not None and os.path.isdir(state):  # another rank may have moved it
            place = os.path.join(self._folder, os.path.basename(state))
            _remove(place)
            os.replace(state, place)
        if is_gathered:
            _remove_kept(self._folder)

    def _failure(self) -> str | None:
        error = self._error
        return None if error is None else "".join(traceback.format_exception(error))

    def _give_up(self, rank: int, why: str) -> None:
        """End the examination, which has failed on ``rank``, and have no other process make it."""
        session = self._session
        self.is_over = True
        self.close()
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

    def _remove_states(self, needed: set[int | None]) -> None:
        """Remove what was kept of the runs before this one, but for those that are ``needed`` on any rank."""
        for number, state in enumerate(self._states[:-1]):
            if number not in needed and state is not None:
                _remove(os.path.dirname(state))
                self._states[number] = None


def _remove_kept(folder: str) -> None:
    """Remove what was kept of the runs in the folder of a report, also by a process that was killed."""
    for path in glob.glob(os.path.join(glob.escape(folder), ".run-*")):
        _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        # Another rank may remove the same folder at this moment.
        shutil.rmtree(path)


def _about_batch(batch: _Batch, rank: int) -> BatchFile:
    """Return what to say of ``batch.pt``, the file of what the run got."""
    if batch.data is None:
        return BatchFile(missing=batch.problem)
    try:
        # The report says how to load the file. weights_only refuses classes of the script, which a batch may have.
        torch.load(io.BytesIO(batch.data), weights_only=True, map_location="cpu")
        is_plain = True
    except Exception:
        is_plain = False
    return BatchFile(file=f"batch-{rank}.pt" if rank else "batch.pt", what=batch.what, weights_only=is_plain)

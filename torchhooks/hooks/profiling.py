"""A hook that profiles runs."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from torchhooks.common.checks import folder, whole_number
from torchhooks.common.files import replacing
from torchhooks.common.log import logger
from torchhooks.common.timers import NEVER, Due, GivenTimer, called_within, given_timer
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import PeriodicHook, RunOptions, SessionRunArgs, SessionRunContext, SessionRunValues
from torchhooks.lifecycle.session import Session


class ProfilerHook(PeriodicHook):
    """Profiles a run periodically (``tf.train.ProfilerHook``), and writes ``timeline-STEP.json``.

    >>> with MonitoredLoop(step, model, optimizer, hooks=[ProfilerHook(save_steps=4, output_dir="profiles")]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    wrote the profile of step 4 to ...profiles/timeline-4.json
    wrote the profile of step 8 to ...profiles/timeline-8.json

    The files are Chrome traces, which https://ui.perfetto.dev opens. STEP is the global step after the run. The first
    run, with its compilation and warm-up, is never profiled. :doc:`Profile </built-in-hooks>` has the details.

    Args:
        save_steps, save_secs, every_n_steps, every_n_secs, every_n_epochs, timer: when to profile; give exactly one,
            see :doc:`Choose a period </built-in-hooks>`.
        output_dir: the folder of the files, by default the current one; it is created if necessary.
        show_memory: whether to record what memory tensors use.
        runs: the number of consecutive runs in one file, the run in which the hook is due and those after it, with what
            the loop does between them.

    Raises:
        ValueError: not exactly one period is given, or a number is not valid.

    Unlike TensorFlow, it has no ``show_dataflow``: the trace always has the arrows.
    """

    needs_step = False  # a run that counts no step is profiled too, to be the one that is due or not

    _in_use: ClassVar[list[ProfilerHook]] = []  # the hook that uses torch's profiler, of which there is one

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] = "",
        show_memory: bool = False,
        *,
        runs: int = 1,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
    ) -> None:
        timer = given_timer(
            timer, every_n_steps, every_n_secs, every_n_epochs, save_steps=save_steps, save_secs=save_secs
        )
        self.set_timer(timer, save_steps=save_steps, save_secs=save_secs)
        # With TensorFlow's periods, the hook guesses which step the next run reaches.
        self._guesses_step = self.triggers_at_once = timer is None
        self.collective = bool(self.timer.signals)  # a rank that does not write may get the signal
        self._given_folder = os.fspath(folder(output_dir, "output_dir"))  # for the log
        self._folder = os.path.abspath(self._given_folder)  # a script may change the current directory while it trains
        self._show_memory = show_memory
        self._runs = whole_number(runs, "runs", 1)
        self._trace = SessionRunArgs(options=RunOptions(trace=True, memory=show_memory))
        self._profiler: Any = None  # of several runs

    def begin(self) -> None:
        super().begin()
        # The step that the next run is taken to reach. A period is counted from the first run on, a signal is not.
        self._next_step: int | None = 0 if self.collective else None
        self._why_no_profile: str | None = "it was not due in this loop"

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._stop_profiler()  # the run failed, and is made again
        super().after_create_session(session, coord)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        session = run_context.session
        self._step_before = session.global_step
        if self in self._in_use and self._profiler is None:
            self._in_use.remove(self)  # the run that was to be profiled failed, and the script has caught the error
        if not self.writes:
            return None
        # The trigger fires when the profile is written. Until then, a run that is due stays so for a later one.
        is_due = self._is_due()
        self.trigger.withdraw()
        if run_context.ends_epoch:
            self.trigger.force()  # the first run of the next epoch is profiled
            return None
        if self._profiler is not None or self._next_step is None or not is_due:
            return None
        running = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001 - torch's only way to ask
        if running or self._in_use:
            self._why_no_profile = "the profiler was in use when it was due"
            return None
        self._in_use.append(self)
        self._begun_at = session.global_step
        if self._runs == 1:
            return self._trace
        self._start_profiler()
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.ends_epoch or not self.writes:
            return
        if self._next_step is None:
            self.trigger.fire(self._step_before)
        self._next_step = self._step_before + 2  # TensorFlow's guess: this run and the next one count one step each
        if self not in self._in_use:
            return
        profile = run_values.run_metadata.profile
        if self._profiler is not None:
            profile = self._profiler
            profile.step()
            self._runs_left -= 1
            if self._runs_left:
                return
        self._stop_profiler()
        self._save(run_context.session, profile)

    def _is_due(self) -> bool:
        if not self._guesses_step:
            return self.trigger.due
        return self._next_step is not None and self.timer.should_trigger_for_step(self._next_step)

    def end(self, session: Session) -> None:
        if self._profiler is not None:
            logger.info("%r: the loop ended in the middle of the %d runs of a profile, which is lost", self, self._runs)
        elif self.writes and self._why_no_profile is not None:
            logger.info("%r wrote no profile: %s", self, self._why_no_profile)

    def teardown(self) -> None:
        self._stop_profiler()

    def next_due(self) -> Due:
        if not self.writes:
            return NEVER
        due = super().next_due()
        if self._next_step is None or self._profiler is not None or (self._guesses_step and self._is_due()):
            return called_within(1, due)
        if self._guesses_step and due.step is not None:
            return Due(step=due.step - 1)  # one run early, to learn the step from which the next one is guessed
        return due

    def _start_profiler(self) -> None:
        from torch.profiler import ProfilerAction, profile

        self._runs_left = last = self._runs

        def action(run: int) -> ProfilerAction:
            # No run warms the profiler up, as in a profile of one run: the run that is due is the first in the file.
            # torch's own schedule() logs a warning of that.
            if run < last - 1:
                return ProfilerAction.RECORD
            return ProfilerAction.RECORD_AND_SAVE if run == last - 1 else ProfilerAction.NONE

        self._profiler = profile(schedule=action, profile_memory=self._show_memory)
        self._profiler.start()

    def _stop_profiler(self) -> None:
        # First, so that other hooks can profile even if torch raises while the profiler stops.
        if self in self._in_use:
            self._in_use.remove(self)
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _save(self, session: Session, profile: Any) -> None:
        """Write ``profile`` as the timeline of the present step."""
        step = session.global_step
        if not self._guesses_step and step <= self._begun_at:
            self._why_no_profile = "the run that was profiled counted no step"
            return  # a later one has the profile
        self.trigger.fire(step)
        self._next_step = step + 1
        name = f"timeline-{step}.json"
        path = os.path.join(self._folder, name)
        with session.paused():
            os.makedirs(self._folder, exist_ok=True)
            with replacing(path) as unfinished:
                profile.export_chrome_trace(unfinished)
        self._why_no_profile = None
        logger.info("wrote the profile of step %d to %s", step, os.path.join(self._given_folder, name))

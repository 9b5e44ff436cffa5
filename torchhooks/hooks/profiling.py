"""A hook that profiles runs."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any, ClassVar

import torch

from torchhooks.common.checks import folder, whole_number
from torchhooks.common.log import logger
from torchhooks.common.timers import NEVER, NOW, Due, EveryEpochs, GivenTimer, given_timer, hook_timer, is_on_request
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import ReportingHook, RunOptions, SessionRunArgs, SessionRunContext, SessionRunValues
from torchhooks.lifecycle.session import Session

_FLOW_PHASES = ("s", "t", "f")  # the start, the steps and the end of an arrow, in the format of Chrome's traces


class ProfilerHook(ReportingHook):
    """Profiles a run periodically (``tf.train.ProfilerHook``), and writes ``timeline-STEP.json``.

    >>> with MonitoredLoop(step, model, optimizer, hooks=[ProfilerHook(save_steps=4, output_dir="profiles")]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    wrote the profile of step 4 to ...profiles/timeline-4.json
    wrote the profile of step 8 to ...profiles/timeline-8.json

    The files are Chrome traces, which https://ui.perfetto.dev opens. STEP is the global step after the run. The first
    run, with its compilation and warm-up, is never profiled. As in TensorFlow, the hook knows the global step only from
    the run before, so that a period of ``save_steps`` can end a run later if runs count several steps. A profiled run
    waits for the device at its end. A StepCounterHook does not count the time that writing the file takes.

    With ``runs``, one file contains several consecutive runs and what the loop did between them. The run in which the
    hook is due then warms the profiler up, and the next ones are recorded. In these runs no hook of another class can
    request a trace.

    Torch has one profiler. A hook that is due while it is in use is due in the next run instead. Two hooks that profile
    the same run share the profile. Of these, list a hook with ``show_dataflow=False`` after one with arrows.

    Args:
        save_steps, save_secs, every_n_steps, every_n_secs, every_n_epochs, timer: when to profile; give exactly one,
            see :doc:`Choose a period </built-in-hooks>`.
        output_dir: the folder of the files, by default the current one; it is created if necessary.
        show_dataflow: whether to draw arrows, such as from an operation to the operation of its gradient and from the
            launch of a kernel to the kernel.
        show_memory: whether to record what memory tensors use.
        runs: the number of runs in one file.

    Raises:
        ValueError: not exactly one period is given, or a number is not valid.
    """

    _in_use: ClassVar[dict[ProfilerHook, bool]] = {}  # the hooks that use the profiler, and whether for several runs

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] = "",
        show_dataflow: bool = True,
        show_memory: bool = False,
        *,
        runs: int = 1,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        every_n_epochs: int | None = None,
        timer: GivenTimer | None = None,
    ) -> None:
        timer = given_timer(timer, every_n_steps, every_n_secs, every_n_epochs)
        self._timer = hook_timer(self, timer, save_steps=save_steps, save_secs=save_secs)
        self._guesses_step = timer is None
        self.collective = self._on_request = is_on_request(timer)  # a rank that does not write may be asked
        self._every_epochs = timer.every_epochs if isinstance(timer, EveryEpochs) else None
        self._given_folder = os.fspath(folder(output_dir, "output_dir"))  # for the log
        self._folder = os.path.abspath(output_dir)  # a script may change the current directory while it trains
        self._show_dataflow, self._show_memory = show_dataflow, show_memory
        self._runs = whole_number(runs, "runs", 1)
        self._request = SessionRunArgs(options=RunOptions(trace=True, memory=show_memory))
        self._profiler: Any = None

    def begin(self) -> None:
        self._timer.reset()
        # What the hook takes for the step that the next run reaches. A request needs no first run to count from.
        self._next_step: int | None = 0 if self._on_request else None
        self._traces = False
        self._epoch_is_due = self._every_epochs == 1
        self._has_written = self._was_in_use = False

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._stop_profiler()  # the run failed, and is made again
        self._epoch_is_due = self._every_epochs == 1 and session.epoch is None
        self._timer.start_at(session.global_step)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._step_before = step = run_context.session.global_step
        self._traces = False
        if not self.writes:
            return None
        if run_context.ends_epoch:
            assert self._every_epochs is not None
            next_number = (run_context.session.epoch or 0) + 2  # from 1 on, of the epoch that follows
            self._epoch_is_due = next_number % self._every_epochs == 0
            return None
        if self._profiler is not None or (self._next_step is None and self._every_epochs is None):
            return None
        if self._every_epochs is not None:
            is_due, self._epoch_is_due = self._epoch_is_due, False
        else:
            is_due = self._timer.should_trigger_for_step(self._next_step if self._guesses_step else step + 1)
        if not is_due:
            return None
        running = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001 - torch's only way to ask
        if running or any(self._in_use.values()) or (self._runs > 1 and self._in_use):
            self._was_in_use = True
            return None
        self._in_use[self] = self._runs > 1
        if self._runs > 1:
            self._start_profiler()
            return None
        self._traces = True
        return self._request

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        if run_context.ends_epoch or not self.writes:
            return
        if self._next_step is None:
            self._timer.update_last_triggered_step(self._step_before)
        self._next_step = self._step_before + 2  # TensorFlow's guess: this run and the next one count one step each
        if self._traces:
            self._stop_profiler()
            self._save(session, run_values.run_metadata.profile)
        elif self._profiler is not None:
            self._profiler.step()
            self._runs_left -= 1
            if not self._runs_left:
                profiler = self._profiler
                self._stop_profiler()
                self._save(session, profiler)

    def end(self, session: Session) -> None:
        if self._profiler is not None:
            logger.info("%r: the loop ended in the middle of the %d runs of a profile, which is lost", self, self._runs)
        elif self.writes and not self._has_written:
            why = "the profiler was in use when it was due" if self._was_in_use else "it was not due in this loop"
            logger.info("%r wrote no profile: %s", self, why)

    def teardown(self) -> None:
        self._stop_profiler()

    def next_due(self) -> Due:
        if not self.writes:
            return NEVER
        if self._every_epochs is not None:
            return Due(step=-1 if self._profiler is not None or self._epoch_is_due else None, epochs=1)
        if self._profiler is not None or self._next_step is None:
            return NOW
        due: Due = self._timer.next_due()
        if not self._guesses_step:
            return due
        if self._timer.should_trigger_for_step(self._next_step):
            return NOW
        # One run early, to learn the step from which the next one is guessed.
        return due if due.step is None else Due(step=due.step - 1)

    def _start_profiler(self) -> None:
        from torch.profiler import profile, schedule

        self._runs_left = 1 + self._runs
        stages = schedule(wait=0, warmup=1, active=self._runs, repeat=1)
        self._profiler = profile(schedule=stages, profile_memory=self._show_memory)
        self._profiler.start()

    def _stop_profiler(self) -> None:
        self._in_use.pop(self, None)
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _save(self, session: Session, profile: Any) -> None:
        """Write ``profile`` as the timeline of the present step."""
        step = session.global_step
        by_step = not self._guesses_step and self._every_epochs is None and not self._on_request
        if by_step and not self._timer.should_trigger_for_step(step):
            return  # the run counted no step: a later one has the profile
        self._timer.update_last_triggered_step(step)
        self._next_step = step + 1
        name = f"timeline-{step}.json"
        path = os.path.join(self._folder, name)
        unfinished = os.path.join(self._folder, f".timeline-{step}.{os.getpid()}.json")
        with session.paused():
            os.makedirs(self._folder, exist_ok=True)
            try:
                # Torch writes a profile only once, and another hook may have had this one written.
                written = getattr(profile, "torchhooks_path", None)
                if written is None:
                    profile.export_chrome_trace(unfinished)
                else:
                    shutil.copyfile(written, unfinished)
                if not self._show_dataflow:
                    _remove_arrows(unfinished)
                os.replace(unfinished, path)
                profile.torchhooks_path = path
            except BaseException:
                if os.path.exists(unfinished):
                    os.remove(unfinished)
                raise
        self._has_written = True
        logger.info("wrote the profile of step %d to %s", step, os.path.join(self._given_folder, name))


def _remove_arrows(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("ph") not in _FLOW_PHASES]
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)

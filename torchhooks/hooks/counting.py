"""The hook that counts: steps per second."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

from torchhooks import summary
from torchhooks.coordinator import Coordinator
from torchhooks.hook import SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.log import logger
from torchhooks.readback import Elapsed, Moment
from torchhooks.session import Session
from torchhooks.text import call_repr
from torchhooks.timer import Due, SecondOrStepTimer
from torchhooks.writers import WriterTarget

_RATE = "global_step/sec"
_CURVES = {tag: summary.scalar(tag, tag) for tag in (_RATE, "examples/sec", "waiting_for_data")}
_WORTH_A_LINE = 0.01, 1e-5  # of the time, and seconds a step: less is what asking for an item takes


class StepCounterHook(SessionRunHook):
    """Reports steps per second (``tf.train.StepCounterHook``): a log line, and a curve ``global_step/sec``.

    The first run starts the clock; a report comes each time a full period has passed since the last, so
    ``every_n_steps=10`` reports at 11, 21, 31. So what the first step takes longer, to compile and to warm up, is not
    counted, and neither is what happens inside ``with session.paused():``. A period in which the step went back gets no
    report, and when one passed without any step, a warning says so once.

    Unlike TensorFlow, on a GPU the time is the device's own, between two events that are read when they have passed:
    nothing waits, and steps that are only queued are not counted as made. The line comes a little later.

    If the loop was driven by ``until_stop``, the share of the time that it waited for data is written beside, as the
    curve ``waiting_for_data``, and logged from 1 % and 10 us a step on.

    Unlike TensorFlow, a loop that goes on from a later step than 0 has ``SessionLog.START`` written in its first run,
    from which TensorBoard knows that the curve beyond this step is void; if no SummarySaverHook does so there. A writer
    with ``purge_from(step)``, as a :class:`torchhooks.JsonLinesWriter`, is told in any loop, and after a recovery.

    Args:
        every_n_steps: steps from one report to the next.
        every_n_secs: seconds from one report to the next; pass ``every_n_steps=None`` with it.
        output_dir: the folder of the event file, or
        summary_writer: the writer. With neither, there is the log line only.
        examples_per_step: how many examples a step takes; reports ``examples/sec`` beside.

    Raises:
        ValueError: not exactly one period was given, or two places to write to.
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: Any = None,
        summary_writer: Any = None,
        *,
        examples_per_step: float | None = None,
    ) -> None:
        self._arguments = {
            "every_n_steps": every_n_steps,
            "every_n_secs": every_n_secs,
            "output_dir": output_dir,
            "summary_writer": summary_writer,
            "examples_per_step": examples_per_step,
        }
        self._timer = SecondOrStepTimer.named(every_n_steps=every_n_steps, every_n_secs=every_n_secs)
        self._every_n_steps = every_n_steps
        if examples_per_step is not None and not examples_per_step > 0:
            raise ValueError(f"examples_per_step={examples_per_step!r}: must be a number of examples, more than 0")
        self._examples_per_step = examples_per_step
        self._target = WriterTarget(output_dir, summary_writer)

    def begin(self) -> None:
        self._timer.reset()
        self._runs = 0
        self._checked_at = (0, -1)
        self._warned = False
        self._began: Moment | None = None
        self._pauses: list[Elapsed] = []
        self._waited_secs: float | None = None
        if self._target.open() is not None:
            summary.check_writer(self._target.writer)

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        if self._target.session_created(session.global_step, self._timer.last_triggered_step()):
            self._timer.reset()
        session.on_pause(lambda pause: self._pauses.append(pause))

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        step = session.global_step
        self._runs += 1
        if self._runs == 1:
            self._target.start_session_alone(session.begun_at, step)
        if self._timer.should_trigger_for_step(step):
            _, elapsed_steps = self._timer.update_last_triggered_step(step)
            self._measure(run_context, elapsed_steps)
        elif self._period_is_over():
            self._warn_if_no_step_was_made(step)
        else:
            return
        self._checked_at = self._runs, step

    def teardown(self) -> None:
        self._target.close()

    def next_due(self) -> Due:
        due = self._timer.next_due()
        if self._every_n_steps is None or self._runs == 0:
            return due
        return Due(due.step, due.moment, self._checked_at[0] + self._every_n_steps - self._runs)

    def sat_out(self, runs: int) -> None:
        self._runs += runs

    def _measure(self, run_context: SessionRunContext, steps: int | None) -> None:
        """End a period, have it reported when its length is known, and begin the next one."""
        session = run_context.session
        begin, pauses, waited = self._began, self._pauses, self._waited_secs
        self._began, self._pauses, self._waited_secs = Moment(session.device), [], session.data_wait_secs
        if begin is None or steps is None or steps < 0:
            return
        share = None
        if waited is not None and self._waited_secs is not None and self._waited_secs > waited:
            # Of the host's time, whose waiting it is.
            share = (self._waited_secs - waited) / (self._began.secs - begin.secs - sum(p.host_secs for p in pauses))
        elapsed = Elapsed(begin, self._began)
        times = elapsed if elapsed.event is not None else elapsed.host_secs, tuple(pauses)
        report = functools.partial(self._report, session.global_step, time.time(), steps, share)
        run_context.when_ready(times, report)

    def _report(
        self,
        step: int,
        wall_time: float,
        steps: int,
        waiting_share: float | None,
        times: tuple[float, tuple[float, ...]],
    ) -> None:
        elapsed, pauses = times
        secs = elapsed - sum(pauses)
        rate = steps / secs if secs > 0 else math.inf
        logger.info("%s: %g", _RATE, rate)
        curves = {_RATE: rate}
        if self._examples_per_step is not None:
            curves["examples/sec"] = rate * self._examples_per_step
            logger.info("examples/sec: %g", curves["examples/sec"])
        if waiting_share is not None:
            curves["waiting_for_data"] = waiting_share
            if waiting_share >= _WORTH_A_LINE[0] and waiting_share * secs >= _WORTH_A_LINE[1] * steps:
                logger.info("waiting for data: %.1f%% of the time", 100 * waiting_share)
        if self._target.writer is not None:
            points = [summary.Summary(_CURVES[tag], value) for tag, value in curves.items()]
            summary.write_summaries(self._target.writer, points, step, wall_time)

    def _period_is_over(self) -> bool:
        if self._every_n_steps is not None:
            return self._runs >= self._checked_at[0] + self._every_n_steps
        moment = self._timer.next_due().moment
        return moment is not None and time.monotonic() >= moment

    def _warn_if_no_step_was_made(self, step: int) -> None:
        if step == self._checked_at[1] and not self._warned:
            self._warned = True
            logger.warning(
                "the global step has been %d for a whole period of %r: if the step calls no optimizer.step(), count in "
                'MonitoredLoop(..., step_unit="run")',
                step,
                self,
            )

    def __repr__(self) -> str:
        return call_repr(self, **self._arguments)

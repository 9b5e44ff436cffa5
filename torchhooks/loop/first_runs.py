"""What is checked at the end of the first runs, because it would be an error, or nothing at all, an hour later."""

from __future__ import annotations

from torchhooks.common.errors import LifecycleError
from torchhooks.common.log import logger
from torchhooks.common.timers import EveryEpochs
from torchhooks.lifecycle.hook import PeriodicHook
from torchhooks.loop.advice import FIRST_RUN, Advice
from torchhooks.loop.schedule import Schedule
from torchhooks.progress.training_state import TrainingState

_RUNS_WITHOUT_STEP = 1000  # more than the gradients of one step accumulate over


class FirstRuns:
    """The checks of the first runs of one loop, which are made at the end of a run until they are over."""

    def __init__(self, training: TrainingState, schedule: Schedule, advice: Advice) -> None:
        self._training, self._schedule, self._advice = training, schedule, advice
        self._checks_epochs_until = 2  # the run: only the second one in an item shows that the item has several
        self._misses_step = not training.loop_state.steps_per_run  # until that was logged
        self.are_over = False
        """Whether a run has come to its end; with ``step_unit="optimizer_step"``, one that has counted a step."""
        training.agenda.after_run(self._check_epochs)
        training.agenda.after_run(self._look_up)
        if training.ranks.may_be_late:
            training.agenda.after_run(self._look_for_ranks)

    def _check_epochs(self) -> bool:
        """Raise, in one of the first runs, if a hook is due by epochs and none can be counted.

        One run before the first ``until_stop`` is only a warning: it may be there to compile the model.
        """
        state, position = self._training.loop_state, self._training.position
        if state.runs > self._checks_epochs_until or state.in_step_fn:
            return True
        by_epochs = [
            slot
            for slot in self._schedule.all_hooks
            if isinstance(slot.hook, PeriodicHook) and isinstance(slot.hook.timer, EveryEpochs)
        ]
        if not by_epochs:
            return True
        why = position.why_no_epoch()
        if why is not None:
            message = f"{by_epochs[0]} is due at the end of an epoch, and {why}"
            if state.runs > 1 or position.has_loops:
                raise LifecycleError(message)
            self._checks_epochs_until += 1
            logger.warning("%s. A second run like this is an error", message)
        return state.runs >= self._checks_epochs_until

    def _look_up(self) -> bool:
        """Look at what the hooks have not asked for yet, once a run has counted a step.

        Hooks that are due by steps ask in runs that count one, and other runs may return less.
        """
        state = self._training.loop_state
        if not state.steps_per_run and state.global_step == state.begun_at:
            if state.runs >= _RUNS_WITHOUT_STEP:
                self.warn_of_no_step()
            return False
        self.are_over = True
        self._advice.say(FIRST_RUN)
        return True

    def _look_for_ranks(self) -> bool:
        self._training.ranks.warn_if_late()
        return True

    def warn_of_no_step(self) -> None:
        """Log a warning, once, that the optimizer whose steps count has made none, so that no hook is due by steps."""
        state, training = self._training.loop_state, self._training
        if not (self._misses_step and state.runs and training.ranks.is_chief):
            return
        self._misses_step = False
        logger.warning(
            'step_unit="optimizer_step": the step() of the %s that the loop has was not called in %d runs, so the '
            "global step is still %d, and what is due by steps never comes due. Pass the optimizer whose step() the "
            'script calls, which for SAM is the one that it wraps, sam.base_optimizer, or use step_unit="run"',
            *(type(training.optimizer).__name__, state.runs, state.global_step),
        )

"""Hooks that decide when a loop stops, and when it may start."""

from __future__ import annotations

import cmath
import functools
import math
import operator
import threading
from typing import Any

import numpy as np
import torch

from torchhooks.coordinator import Coordinator
from torchhooks.errors import LifecycleError, NanLossDuringTrainingError
from torchhooks.fetch import ComposedFetch, as_snapshot, describe, leaves, named_outputs, watched_names
from torchhooks.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.log import logger
from torchhooks.readback import copiers, is_remote, to_host
from torchhooks.session import Session
from torchhooks.text import call_repr
from torchhooks.timer import NEVER, Due, count

_POLL_SECS = 0.1


class StopAtStepHook(SessionRunHook):
    """Stops at a step (``tf.train.StopAtStepHook``): the run that reaches it is the last.

    Unlike TensorFlow, which guesses the step before it looks, the real step decides, also in runs that count no step or
    several. A loop that starts beyond its last step makes one run, as TensorFlow's does.

    Args:
        num_steps: steps to make from where the first session begins; a recovery does not make them start again.
        last_step: the global step to stop at.

    Raises:
        ValueError: both were given or none, or one that is no number of steps.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        self._num_steps, self._given_last_step = num_steps, last_step
        if (num_steps is None) == (last_step is None):
            both = "" if num_steps is None else ", not both"
            raise ValueError(f"{self!r}: give one of num_steps and last_step{both}")
        if num_steps is not None:
            count(num_steps, "num_steps")
        elif _whole(last_step, "last_step") < 0:
            raise ValueError(f"last_step={last_step!r}: must be 0 or more")
        self._last_step = last_step

    def begin(self) -> None:
        self._last_step = self._given_last_step

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        if self._last_step is None:
            assert self._num_steps is not None
            self._last_step = session.global_step + self._num_steps

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = run_context.session.global_step
        assert self._last_step is not None
        if step >= self._last_step:
            run_context.request_stop(f"step {step}")

    def next_due(self) -> Due:
        return Due(step=self._last_step)

    def __repr__(self) -> str:
        return call_repr(self, num_steps=self._num_steps, last_step=self._given_last_step)


class NanTensorHook(SessionRunHook):
    """Stops, or fails, when a value is not a number (``tf.train.NanTensorHook``). Looks at every run.

    Unlike TensorFlow, a value on a GPU is looked at there, behind the step, and what was found is read later: nothing
    waits, the message names the step at which the value was NaN, and the loop ends a few runs after it.

    Args:
        loss_tensor: what to watch: any fetch of real numbers, one NaN in it is enough.
        fail_on_nan_loss: whether to raise, or else to stop after the run, with a warning.
        also_inf: whether an infinity counts as well.
        max_lag_steps: how many runs later than on the CPU, where it is always exact, a NaN on a device may be noticed;
            0 waits for the device in every run. ``None``: as soon as it can be known without waiting.

    Raises:
        NanLossDuringTrainingError: out of the run in which the NaN is noticed, with ``fail_on_nan_loss``.
    """

    def __init__(
        self,
        loss_tensor: Any,
        fail_on_nan_loss: bool = True,
        *,
        also_inf: bool = False,
        max_lag_steps: int | None = None,
    ) -> None:
        self._loss_tensor = loss_tensor
        self._fail_on_nan_loss = fail_on_nan_loss
        self._also_inf = also_inf
        if max_lag_steps is not None and max_lag_steps != 0:
            count(max_lag_steps, "max_lag_steps")
        self._max_lag_steps = max_lag_steps
        self._badness = _Badness(loss_tensor, also_inf)
        self._request = SessionRunArgs(self._badness)
        self._message: str | None = None
        self._out_of_sight = False

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._message = self._badness.found = None  # after a recovery the state is one from before the NaN
        # A subclass that does something of its own in runs is called in all of them.
        own = any(getattr(type(self), name) is not getattr(NanTensorHook, name) for name in ("before_run", "after_run"))
        self._out_of_sight = own or type(self._loss_tensor) is not str or bool(watched_names(self._loss_tensor))
        session.guard_checkpoints(lambda: self._message or self._what_is_wrong_now(session))

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return self._request

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        found = run_values.results
        if found is not None:
            if self._max_lag_steps == 0:
                found = to_host(found)
            notice = functools.partial(self._notice, run_context, run_context.session.global_step)
            run_context.when_ready(found, notice, max_lag_runs=self._max_lag_steps)

    def next_due(self) -> Due | None:
        return None if self._out_of_sight else Due(when=self._looks_bad)

    def _looks_bad(self, outputs: Any) -> bool:
        name, value = self._loss_tensor, outputs
        if name != "loss" or type(outputs) is not torch.Tensor:
            named = named_outputs(outputs)
            value = named[name] if name in named else None  # noqa: SIM401 - a mapping of the user's may have no get()
        if type(value) is torch.Tensor and value.is_cpu and value.numel() == 1 and "cpu" not in copiers:
            value = value.item()
        if type(value) is float and math.isfinite(value):
            self._badness.found = None  # that of an earlier run
            return False
        self._out_of_sight = self._out_of_sight or type(value) is not float
        return True

    def _what_is_wrong_now(self, session: Session) -> str | None:
        """For a saver that stands in front of this hook, and asks before it was told of the run."""
        kinds = _kinds_of(to_host(self._badness.found))
        return f"{describe(self._loss_tensor)} is {kinds[0]} at step {session.global_step}" if kinds else None

    def _notice(self, run_context: SessionRunContext, step: int, found: dict[str, Any]) -> None:
        kinds = _kinds_of(found)
        if not kinds or self._message is not None:
            return
        self._message = message = f"{describe(self._loss_tensor)} is {kinds[0]} at step {step}"
        if self._fail_on_nan_loss:
            logger.error("%s: training fails", message)
            raise NanLossDuringTrainingError(
                f"{message}. NanTensorHook(..., fail_on_nan_loss=False) stops at such a step instead of failing."
            )
        logger.warning("%s: training stops", message)
        run_context.request_stop(message)

    def __repr__(self) -> str:
        return call_repr(
            self,
            self._loss_tensor,
            fail_on_nan_loss=self._fail_on_nan_loss,
            also_inf=self._also_inf,
            max_lag_steps=self._max_lag_steps,
        )


class _Badness(ComposedFetch):
    """What is wrong with a value: ``None``, or a dict from kind to whether it is so, which may be on a device.

    ``found`` keeps it from the moment at which it is known, before anybody's ``after_run``.
    """

    copies = False

    def __init__(self, fetch: Any, also_inf: bool) -> None:
        self.found: dict[str, Any] | None = None
        self._fetch = fetch
        self._kinds = {"NaN": "isnan", "infinite": "isinf"} if also_inf else {"NaN": "isnan"}

    @property
    def fetch(self) -> Any:
        return self._fetch

    def compose(self, value: Any) -> dict[str, Any] | None:
        self.found = None
        if type(value) is torch.Tensor and not is_remote(value) and value.numel() == 1:
            value = value.item()
        if type(value) is float and math.isfinite(value):
            return None  # the way of nearly every run
        parts = list(leaves(value))
        found = {kind: _any_of(parts, test) for kind, test in self._kinds.items()}
        if any(is_so is not False for is_so in found.values()):
            self.found = found
        return self.found


def _any_of(parts: list[Any], test: str) -> Any:
    """Whether one of ``parts`` passes ``test``: a bool, or a flag a device, so that nothing waits for one."""
    if any(_any(part, test) for part in parts if not is_remote(part)):
        return True
    flags: dict[torch.device, torch.Tensor] = {}
    for part in parts:
        if is_remote(part):
            flag = getattr(part.detach(), test)().any()
            flags[part.device] = flag if part.device not in flags else flags[part.device].logical_or(flag)
    return [as_snapshot(flag) for flag in flags.values()] or False


def _kinds_of(found: dict[str, Any] | None) -> list[str]:
    """The kinds that were found, the flags being on the host by now."""
    return [kind for kind, is_so in (found or {}).items() if (any(is_so) if isinstance(is_so, list) else is_so)]


def _any(value: Any, kind: str) -> bool:
    """Whether ``value``, or one element of it, is of that ``kind``: ``"isnan"`` or ``"isinf"``."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return bool(getattr(value, kind)().any())
        value = value.item()
    if isinstance(value, (float, complex)):
        return bool(getattr(cmath, kind)(value))
    if isinstance(value, int):
        return False
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return bool(getattr(np, kind)(value).any())
    raise TypeError(f"NanTensorHook got {value!r}: watch numbers, tensors or arrays, or these in lists and dicts")


class GlobalStepWaiterHook(SessionRunHook):
    """Keeps the first run waiting until the global step is reached (``tf.train.GlobalStepWaiterHook``).

    A way to let workers join one after the other. The step is ``session.global_step``, which only another thread of
    this process can advance: one that is registered with the coordinator, as a :class:`torchhooks.LooperThread` is.

    Args:
        wait_until_step: the step to wait for; 0 or less waits for nothing.

    Raises:
        ValueError: ``wait_until_step`` is no whole number.
        LifecycleError: out of the run, if there is no such thread, so that the wait would never end.
    """

    def __init__(self, wait_until_step: int) -> None:
        self._wait_until_step = _whole(wait_until_step, "wait_until_step")
        self._waited = False

    def begin(self) -> None:
        self._waited = self._wait_until_step <= 0

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._coord = coord

    def before_run(self, run_context: SessionRunContext) -> None:
        if not self._waited:
            self._wait(run_context.session)

    def next_due(self) -> Due | None:
        return NEVER if self._waited else None

    def _wait(self, session: Session) -> None:
        if session.global_step < self._wait_until_step:
            logger.info("waiting for global step %d", self._wait_until_step)
        while session.global_step < self._wait_until_step:
            if not [thread for thread in self._coord.live_threads() if thread is not threading.current_thread()]:
                raise LifecycleError(
                    f"{self!r}: the global step is {session.global_step}, and nothing in this process advances it "
                    "while this run waits: register the thread that does with the coordinator, or leave the hook out"
                )
            if self._coord.wait_for_stop(_POLL_SECS) or session.interrupted:
                return
        self._waited = True

    def __repr__(self) -> str:
        return call_repr(self, self._wait_until_step)


def _whole(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be a whole number")
    return number

"""The settings of a loop: numbers and words among the arguments of its constructor."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from torchhooks.common.checks import exception_types, seconds, whole_number
from torchhooks.common.text import shown
from torchhooks.progress.signals import checked_signals


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The settings of a :class:`torchhooks.MonitoredLoop`, with the meaning that they have there."""

    step_unit: str
    recoverable_errors: tuple[type[BaseException], ...]
    max_recoveries: int
    signals: tuple[signal.Signals, ...]
    stop_grace_period_secs: float
    stall_secs: float | None
    stall_action: Literal["report", "abort"]

    @classmethod
    def checked(
        cls,
        *,
        step_unit: str,
        recoverable_errors: Iterable[type[BaseException]],
        max_recoveries: int,
        signals: Iterable[str | signal.Signals] | None,
        stop_grace_period_secs: float,
        stall_secs: float | None,
        stall_action: str,
    ) -> LoopSettings:
        """Return the settings that the caller of the constructor gave.

        Raises:
            TypeError, ValueError: one of them is not valid.
        """
        if step_unit not in ("run", "optimizer_step"):
            raise ValueError(f'step_unit={step_unit!r}: must be "run" or "optimizer_step"')
        if stall_action not in ("report", "abort"):
            raise ValueError(f'stall_action={shown(stall_action)}: must be "report" or "abort"')
        return cls(
            step_unit=step_unit,
            recoverable_errors=exception_types(recoverable_errors, "recoverable_errors", "(AbortedError,)"),
            max_recoveries=whole_number(max_recoveries, "max_recoveries", 0),
            signals=checked_signals(signals),
            stop_grace_period_secs=seconds(stop_grace_period_secs, "stop_grace_period_secs"),
            stall_secs=None if stall_secs is None else seconds(stall_secs, "stall_secs"),
            stall_action=cast(Literal["report", "abort"], stall_action),
        )

"""The settings of a loop: the arguments of its constructor, checked in one place."""

import dataclasses
import inspect
from typing import Any

import pytest

from torchhooks import MonitoredLoop, SessionRunHook
from torchhooks.lifecycle.settings import LoopSettings


class Stateful(SessionRunHook):
    name = "counts"

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def given(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a constructor that was called with ``changes``."""
    parameters = inspect.signature(MonitoredLoop).parameters
    return {name: parameter.default for name, parameter in parameters.items()} | changes


def test_each_argument_of_the_loop_is_a_setting_of_the_same_name() -> None:
    fields = [field.name for field in dataclasses.fields(LoopSettings)]
    assert fields == [*inspect.signature(MonitoredLoop).parameters]


def test_settings_do_not_change() -> None:
    settings = LoopSettings.checked(given())
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.max_recoveries = 3  # type: ignore[misc]


def test_what_the_script_changes_later_is_copied() -> None:
    hooks, state, metadata = [Stateful()], {"hook": Stateful()}, {"lr": [0.1]}
    settings = LoopSettings.checked(given(hooks=hooks, state=state, metadata=metadata))
    hooks.clear(), state.clear(), metadata["lr"].append(0.2)  # type: ignore[func-returns-value]
    assert (len(settings.hooks), len(settings.state), settings.metadata) == (1, 1, {"lr": [0.1]})


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "step": (3, TypeError, "step=3: must be a function"),
    "model": (3, TypeError, "model=3: must be a torch.nn.Module"),
    "optimizer": (3, TypeError, "optimizer=3: must be a torch.optim.Optimizer"),
    "hooks": (3, TypeError, "hooks=3: pass a list of hooks"),
    "scaffold": (3, TypeError, "scaffold=3: must be a Scaffold"),
    "state": (3, TypeError, "state=3: must be a dict"),
    "checkpoint_dir": (3, TypeError, "checkpoint_dir=3: must be the path of a folder"),
    "step_unit": ("epoch", ValueError, "step_unit='epoch': must be"),
    "recoverable_errors": (3, TypeError, "recoverable_errors=3: give exception types"),
    "max_recoveries": (-1, ValueError, "max_recoveries=-1"),
    "signals": (["SIGNONE"], ValueError, "SIGNONE"),
    "stop_grace_period_secs": (-1, ValueError, "stop_grace_period_secs=-1"),
    "metadata": (3, TypeError, "metadata=3: must be a dict"),
    "ranks": (3, TypeError, "ranks=3"),
    "stall_secs": (-1, ValueError, "stall_secs=-1"),
    "stall_action": ("ends", ValueError, "stall_action='ends': must be"),
}


def test_every_setting_is_checked() -> None:
    assert [*WRONG] == [field.name for field in dataclasses.fields(LoopSettings)]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_an_error_that_names_it(name: str) -> None:
    value, error, message = WRONG[name]
    for make in (lambda: MonitoredLoop(**{name: value}), lambda: LoopSettings.checked(given(**{name: value}))):
        with pytest.raises(error) as raised:
            make()
        assert message in str(raised.value)


def test_two_hooks_of_one_name_are_an_error_of_the_settings() -> None:
    with pytest.raises(ValueError, match="would both save their state as 'counts'"):
        LoopSettings.checked(given(hooks=[Stateful(), Stateful()]))

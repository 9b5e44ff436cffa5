"""What checkpoints contain of the parts of a training run, as values that do not depend on whether they were loaded."""

from __future__ import annotations

from typing import Any

import torch

from torchhooks.common.members import attributes_of
from torchhooks.common.stateful import has_readable_state
from torchhooks.data.variables import Variables
from torchhooks.fetches.names import bare_optimizer, parameters_of


def is_readable(part: object) -> bool:
    """Return whether the state of ``part`` can be read: it is no loader, which may start workers."""
    return isinstance(part, Variables) or has_readable_state(part)


def state_of(part: Any) -> object:
    """Return the value of what checkpoints contain of ``part``, which is readable.

    Of an optimizer, it is the options of its groups and the states in the order of its parameters. Of Variables, it is
    the variables: their state_dict() has pickles, whose bytes depend on what refers to what.
    """
    bare = bare_optimizer(part)
    if isinstance(bare, torch.optim.Optimizer):
        groups = [{key: value for key, value in group.items() if key != "params"} for group in bare.param_groups]
        return [groups, [bare.state.get(each) for each in parameters_of(bare)]]
    if isinstance(part, Variables):
        return dict(attributes_of(part))
    return dict(part.state_dict()) if isinstance(part, torch.nn.Module) else part.state_dict()

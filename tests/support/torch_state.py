"""What is registered in torch or running there. torch has no public names for these."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch


def hooks_on(model: nn.Module) -> list[str]:
    """Return the names of the submodules with module hooks, ``""`` for the model itself."""
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._forward_hooks_with_kwargs
        or module._forward_pre_hooks_with_kwargs
    ]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a backward pass calls hooks of ``tensor``."""
    return bool(tensor._backward_hooks)


def hooks_on_optimizer(optimizer: torch.optim.Optimizer) -> int:
    """Return how many functions are called after a step of ``optimizer``."""
    return len(optimizer._optimizer_step_post_hooks)


def is_profiling() -> bool:
    """Return whether torch's profiler records."""
    return bool(torch._C._autograd._profiler_enabled())


def has_dispatch_mode() -> bool:
    """Return whether a mode, such as one that counts operations, sees the operators."""
    return dispatch._get_current_dispatch_mode() is not None

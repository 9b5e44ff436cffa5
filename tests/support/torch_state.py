"""What torch has no public names for: what is registered there and what is running."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch


def hooks_on(model: nn.Module) -> list[str]:
    """Return the names of the submodules with module hooks, ``""`` for the model itself."""
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks  # noqa: SLF001 - torch's
        or module._forward_pre_hooks  # noqa: SLF001 - torch's
        or module._backward_hooks  # noqa: SLF001 - torch's
        or module._backward_pre_hooks  # noqa: SLF001 - torch's
        or module._forward_hooks_with_kwargs  # noqa: SLF001 - torch's
        or module._forward_pre_hooks_with_kwargs  # noqa: SLF001 - torch's
    ]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a backward pass calls hooks of ``tensor``."""
    return bool(tensor._backward_hooks)  # noqa: SLF001 - torch's


def hooks_on_optimizer(optimizer: torch.optim.Optimizer) -> int:
    """Return how many functions are called after a step of ``optimizer``."""
    return len(optimizer._optimizer_step_post_hooks)  # noqa: SLF001 - torch's


def is_profiling() -> bool:
    """Return whether torch's profiler records."""
    return bool(torch._C._autograd._profiler_enabled())  # noqa: SLF001 - torch's


def has_dispatch_mode() -> bool:
    """Return whether a mode, such as one that counts operations, sees the operators."""
    return dispatch._get_current_dispatch_mode() is not None  # noqa: SLF001 - torch's

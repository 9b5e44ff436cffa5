"""Random states of Python, NumPy and torch: read them, and set them again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

RandomStates = dict[str, Any]
"""What :func:`random_states` returns."""


def random_states() -> RandomStates:
    """Return the global random states of Python, NumPy and torch, and of the accelerator once it is in use.

    The states are plain data, so that ``torch.load(..., weights_only=True)`` can read them back.
    """
    states = {
        "python": random.getstate(),
        "numpy": without_arrays(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        # Asking for a state would initialize CUDA. That takes memory on the device, and a process that is forked
        # afterwards, such as a worker of a DataLoader, could no longer use the device.
        if getattr(module, "is_initialized", module.is_available)() and hasattr(module, "get_rng_state"):
            devices = [torch.device(accelerator.type, index) for index in range(module.device_count())]
            states[accelerator.type] = [module.get_rng_state(device) for device in devices]
    return states


def set_random_states(states: RandomStates) -> None:
    """Set what :func:`random_states` returned, on as many accelerators as there are."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in states:
        module = torch.get_device_module(accelerator)
        for index, state in enumerate(states[accelerator.type][: module.device_count()]):
            module.set_rng_state(state, torch.device(accelerator.type, index))


def same_random_states(one: RandomStates, other: RandomStates) -> bool:
    """Return whether no random number was drawn on the CPU between two calls of :func:`random_states`."""
    return torch.equal(one["torch"], other["torch"]) and all(one[name] == other[name] for name in ("python", "numpy"))


def without_arrays(state: object) -> Any:
    """Return ``state`` with lists in place of NumPy arrays, which ``weights_only=True`` does not load."""
    if isinstance(state, dict):
        return {key: without_arrays(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state

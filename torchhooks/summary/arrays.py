"""Tensors and arrays on the host: the number in one, the name of a dtype, images side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_Array = np.ndarray[Any, Any]


def number_in(value: Any) -> Any:
    """Return the number in a tensor or array with one element, which must be on the host; anything else as it is."""
    if isinstance(value, torch.Tensor):
        try:
            # Unlike Tensor.item(), this keeps the GIL, which a writer's background thread would take in between.
            return value.numpy().item()
        except (TypeError, RuntimeError):  # a dtype or layout that numpy does not have
            return value.item()
    return value.item() if isinstance(value, (np.ndarray, np.generic)) else value


def dtype_name(value: Any) -> str:
    """Return the name of the dtype of a tensor or array; torch and numpy use the same names."""
    return getattr(value.dtype, "name", None) or str(value.dtype).removeprefix("torch.")


def grid(batch: _Array) -> _Array:
    """Return a batch of shape (N, C, H, W) as one image of shape (C, rows x H, columns x W), padded with black."""
    count, channels, height, width = batch.shape
    columns = min(count, 8)
    padded = np.pad(batch, ((0, -count % columns), (0, 0), (0, 0), (0, 0)))
    cells = padded.reshape(-1, columns, channels, height, width).transpose(2, 0, 3, 1, 4)
    return cells.reshape(channels, -1, columns * width)

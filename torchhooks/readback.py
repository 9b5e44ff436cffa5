"""Device to host: the only place that may wait for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchhooks.fetch import map_leaves


class Readback:
    """Brings values to the host and hands them to callbacks, in the order of the requests."""

    def request(self, values: Any, callback: Callable[[Any], object]) -> None:
        """Call ``callback`` with ``values``, CPU tensors in place of device tensors."""
        callback(to_host(values))

    def drain(self) -> None:
        """Make every call that has not been made yet."""


def to_host(values: Any) -> Any:
    """``values`` with CPU tensors in place of device tensors. Waits for the device."""
    return map_leaves(_tensor_to_host, values)


def _tensor_to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value.to("cpu")  # waits for the device
    return value

"""Objects with a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Box:
    """An object whose state is one value, and which may raise after it has loaded one."""

    state_is_optional = False  # as of a hook

    def __init__(self, value: Any = None, raises: BaseException | None = None) -> None:
        self.value, self.raises = value, raises

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.value = state_dict["value"]
        if self.raises is not None:
            raise self.raises

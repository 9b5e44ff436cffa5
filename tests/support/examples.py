"""How many examples of a property are tried, and how many cases of a long table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

MOST = 100  # of hypothesis, with the profile "all"


def examples(number: int) -> settings:
    """Try ``number`` examples when all tests run, and a smaller part in the profile of a plain pytest."""
    assert settings.default is not None
    return settings(max_examples=max(number * settings.default.max_examples // MOST, 1))


def shared(cases: Iterable[Any], period: int) -> list[Any]:
    """Return the cases as parameters: every ``period``-th is for the gate, the others for ``pytest --all``."""
    parameters = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=[pytest.mark.release] if number % period else []))
    return parameters

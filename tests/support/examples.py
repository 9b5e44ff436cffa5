"""How many examples of a property are tried."""

from __future__ import annotations

from hypothesis import settings

MOST = 100  # of hypothesis, with the profile "all"


def examples(number: int) -> settings:
    """Try ``number`` examples when all tests run, and a smaller part in the profile of a plain pytest."""
    assert settings.default is not None
    return settings(max_examples=max(number * settings.default.max_examples // MOST, 1))

"""What a step takes."""

from __future__ import annotations

from typing import Any

from torchhooks.fetches.names import takes_one_argument


def two(x: Any, y: Any) -> None: ...


def test_a_function_without_a_signature_may_take_one_argument() -> None:
    assert [takes_one_argument(each) for each in (dict, two, len)] == [True, False, True]

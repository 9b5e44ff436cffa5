"""What a step takes."""

from __future__ import annotations

from typing import Any

import pytest

from torchhooks.fetches.step import Step, takes_one_argument


def two(x: Any, y: Any) -> None: ...


@pytest.mark.parametrize(
    ("args", "way_out"),
    [
        (((1, 2),), "pass the items of the batch one by one, loop.run(*batch)"),
        (({"x": 1, "y": 2},), "pass the items of the batch by name, loop.run(**batch)"),
        (({"x": 1},), "pass what it takes to run()"),
    ],
)
def test_a_call_that_does_not_fit_is_explained(args: tuple[Any, ...], way_out: str) -> None:
    explained = Step(two).explain_call(args, {})
    assert explained is not None
    assert explained.endswith(way_out)


def test_a_call_that_fits_or_may_fit_needs_no_explanation() -> None:
    assert Step(two).explain_call((1,), {"y": 2}) is None
    assert Step(dict).explain_call((1, 2, 3), {}) is None  # has no signature


def test_a_function_without_a_signature_may_take_one_argument() -> None:
    assert [takes_one_argument(each) for each in (dict, two, len)] == [True, False, True]

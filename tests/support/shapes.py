"""Training scripts of one line: the shape of their loops, and what a process of them does, as text.

=========  =========================================================================================
``3{r}``   ``for item in loop.until_stop(range(3))``, with a run in the body
``L3{r}``  the same over a list of three numbers; ``ab{r}`` over the list of two letters
``3{}``    the same without a run
``r``      a run; it is traced as the items of the loops around it, as in ``02``
``p``      a run in a plain loop of the script, which looks at ``should_stop()`` before it
``!1``     ``break`` if the item is ``1``
``?``      ``break`` if ``should_stop()``
``,``      code behind a loop, which is traced as ``,``
=========  =========================================================================================

So ``2{L2{r},}`` are two epochs of two batches, with a validation behind each of them, and its trace is
``00 01 , 10 11 ,``. What another letter does, the test says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchhooks import MonitoredLoop

Letters = Mapping[str, Callable[[], object]]
"""What another letter does, or a dot and a letter."""

TOKEN = re.compile(r"L?\d+\{|[a-z]+\{|\}|!\w|\.?[a-z]|[,?]")


def train(loop: MonitoredLoop[Any], shape: str, trace: list[str], letters: Letters | None = None) -> None:
    """Run the script in the context of ``loop``, and add what it does to ``trace``."""
    tokens = TOKEN.findall(shape)
    assert "".join(tokens) == shape, f"{shape} has more than {tokens}"
    with loop:
        _body(loop, _parsed(iter(tokens)), "", trace, letters or {})


def _parsed(tokens: Iterator[str]) -> list[Any]:
    body: list[Any] = []
    for token in tokens:
        if token == "}":
            break
        body.append((token[:-1], _parsed(tokens)) if token.endswith("{") else token)
    return body


def _items(text: str) -> Any:
    if text.isdigit():
        return range(int(text))
    return [*range(int(text[1:]))] if text[1:].isdigit() else [*text]


def _body(loop: MonitoredLoop[Any], body: list[Any], place: str, trace: list[str], letters: Letters) -> bool:
    """Return whether the loop is left by ``break``."""
    for part in body:
        match part:
            case (items, inner):
                for item in loop.until_stop(_items(items)):
                    if _body(loop, inner, f"{place}{item}", trace, letters):
                        break
            case str() if part in letters:
                letters[part]()
            case "r" | "p":
                if part == "p" and loop.should_stop():
                    return False
                loop.run()
                trace.append(place)
            case ",":
                trace.append(",")
            case "?":
                if loop.should_stop():
                    return True
            case _ if part[0] == "!":
                if place[-1] == part[1]:
                    return True
            case _:
                raise ValueError(f"{part}: nothing says what this letter does")
    return False

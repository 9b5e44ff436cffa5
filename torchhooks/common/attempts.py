"""Do several things even if some of them fail, and report the errors once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Attempts:
    """Collects the errors of several calls.

    Args:
        catch: the errors to collect; others propagate at once.
    """

    def __init__(self, catch: type[BaseException] = BaseException) -> None:
        self._catch = catch
        self.errors: list[BaseException] = []

    def __call__(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function(*args)`` and collect its error."""
        try:
            function(*args)
        except self._catch as error:
            self.errors.append(error)

    def raise_errors(self, message: str) -> None:
        """Raise the error if there is one; raise several as an ``ExceptionGroup`` with ``message``.

        The first that is not an ``Exception``, such as KeyboardInterrupt, is raised itself, with the others as its
        cause: ``except KeyboardInterrupt`` does not see inside a group, and neither does the exit code of the process.
        """
        errors = list({id(error): error for error in self.errors}.values())  # two calls may raise the same one
        interrupt = next((error for error in errors if not isinstance(error, Exception)), None)
        if len(errors) == 1:
            raise errors[0]
        if interrupt is not None:
            others = [error for error in errors if error is not interrupt]
            raise interrupt from BaseExceptionGroup(message, others)
        if errors:
            raise BaseExceptionGroup(message, errors)

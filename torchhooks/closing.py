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

    @property
    def interrupt(self) -> BaseException | None:
        """The first error that is not an ``Exception``, such as KeyboardInterrupt."""
        return next((error for error in self.errors if not isinstance(error, Exception)), None)

    def raise_errors(self, message: str) -> None:
        """Raise the error if there is one; raise several as an ``ExceptionGroup`` with ``message``."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise BaseExceptionGroup(message, self.errors)

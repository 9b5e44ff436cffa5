"""Who asks for values: one type for what evaluates them, brings them to the host and names the hook in an error."""

from __future__ import annotations


class Requester:
    """A hook, or a call such as ``Session.run``, that asks for values. Its ``str`` is what errors name.

    A hook that takes part in runs has a subclass of this, :class:`torchhooks.loop.schedule.ScheduledHook`.
    """

    def __init__(self, hook: object = None, name: str = "") -> None:
        self.hook = hook
        """The hook that asks; ``None`` if no hook does."""
        self._name = name

    def why_alone(self) -> str | None:
        """Return why one rank may ask in a run in which others do not, and the way out; ``None`` if all ask."""
        return None

    def __str__(self) -> str:
        return self._name or str(self.hook)  # not earlier, because the repr of a hook can be slow


UNKNOWN = Requester(name="an unknown caller")
"""Who asks if neither a hook nor a call is known."""

"""The exceptions that torchhooks defines.

    Exception
    ├── TorchHooksError
    │   ├── AbortedError                    raise it in a run to ask for recovery
    │   ├── CheckpointError                 a checkpoint cannot be written, read or loaded
    │   │   └── DamagedCheckpointError      its file is missing, truncated or modified
    │   ├── FeedError                       (also RuntimeError) two feeds for one parameter, or none to feed
    │   ├── FetchError                      (also LookupError) a fetch has no value
    │   │   └── NoRunYetError               only a run could give it one, and there is none
    │   ├── LifecycleError                  (also RuntimeError) a call that is too late, too early or nested
    │   ├── NanLossDuringTrainingError      (also RuntimeError) a watched value is NaN or infinite
    │   └── PeerError                       (also RuntimeError) another rank failed, or does not answer
    └── TypeError, ValueError               an invalid argument, as everywhere in Python

Exceptions that a step, a hook or a closure raises are never wrapped: they keep their type and their traceback. Those
from a hook or a closure get a note (``__notes__``) that names the hook, the method and the step.
"""

import contextlib


class TorchHooksError(Exception):
    """Base class of the exceptions that torchhooks defines."""


class AbortedError(TorchHooksError):
    """A run was cut short by something outside of it and may be retried (``tf.errors.AbortedError``)."""


class CheckpointError(TorchHooksError):
    """A checkpoint cannot be written or read, or does not match the objects that it is loaded into."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file is missing, truncated or modified, or is not a checkpoint at all."""


class FeedError(TorchHooksError, RuntimeError):
    """A parameter of the step is fed twice: by two hooks, or by a hook and the caller of ``run``.

    Or a hook feeds the body of ``loop.step()``, which has no parameters.
    """


class FetchError(TorchHooksError, LookupError):
    """A fetch has no value: its name is unknown, or this run did not produce it."""


class NoRunYetError(FetchError):
    """A fetch that only a run can give a value is evaluated before the first run, or after one whose step failed."""


class LifecycleError(TorchHooksError, RuntimeError):
    """A loop or a session is used after it stopped or closed, or from inside its own run."""


class NanLossDuringTrainingError(TorchHooksError, RuntimeError):
    """A value that a NanTensorHook watches is NaN or, if it looks for these, infinite. The name is TensorFlow's."""


class PeerError(TorchHooksError, RuntimeError):
    """The loop cannot continue because of another rank: it failed, it does not answer, or it ended too early.

    It is not an :class:`AbortedError`: one process alone cannot recover. ``torchrun --max-restarts`` restarts all.

    Args:
        message: the whole message.
        rank: the rank that caused it; ``None`` if that is unknown.
        run: the number of the run in which, or after which, it happened.
        reason: what happened on that rank.
    """

    def __init__(self, message: str, rank: int | None = None, run: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.run = run
        self.reason = reason


def add_note(error: BaseException, note: str) -> None:
    """Add ``note`` to ``error``. Does nothing if its class refuses, so that ``error`` is never replaced by another."""
    with contextlib.suppress(Exception):
        error.add_note(note)


def interrupt_in(error: BaseException) -> BaseException | None:
    """Return the first exception of the chain of ``error`` that is not an ``Exception``, such as KeyboardInterrupt.

    A Ctrl-C that arrives in a callback is raised there, and the code that called it may replace it by an error about
    the callback.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        if not isinstance(link, Exception):
            return link
        seen.add(id(link))
        waiting += [link.__context__, link.__cause__]
    return None


def brief(error: BaseException) -> str:
    """Return the type and the message of ``error``; the type alone if it has no message or cannot be printed."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

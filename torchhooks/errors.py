"""Everything torchhooks raises on its own account.

    Exception
    ├── TorchHooksError
    │   ├── AbortedError                    raise it in a run to ask for recovery
    │   ├── CheckpointError                 a checkpoint that could not be written, read or loaded
    │   │   └── DamagedCheckpointError      its file is missing, cut short or changed
    │   ├── FeedError                       (also RuntimeError) two feeds for one name
    │   ├── FetchError                      (also LookupError) a fetch that has no value
    │   │   └── NoRunYetError               an output was asked for when there is none yet
    │   ├── LifecycleError                  (also RuntimeError) a call that comes too late, too early or nested
    │   └── NanLossDuringTrainingError      (also RuntimeError) the watched value is not a number
    └── TypeError, ValueError               an argument of the wrong kind, as everywhere in Python

An exception of the user's own, out of a step, a hook or a closure, is never wrapped: it keeps its type and its
traceback. One out of a hook or a closure gets a note (``__notes__``) that names the hook, the method and the step.
"""

import contextlib


class TorchHooksError(Exception):
    """The root of the errors that torchhooks defines."""


class AbortedError(TorchHooksError):
    """A run was cut short by something outside of it and may be tried again."""


class CheckpointError(TorchHooksError):
    """A checkpoint could not be written or read, or does not fit the training."""


class DamagedCheckpointError(CheckpointError):
    """The file of a checkpoint is not what was written: missing, cut short, changed, or never a checkpoint."""


class FeedError(TorchHooksError, RuntimeError):
    """One parameter of the step was fed twice: by two hooks, or by a hook and the caller."""


class FetchError(TorchHooksError, LookupError):
    """A fetch has no value: an unknown name, or something that this run did not produce."""


class NoRunYetError(FetchError):
    """A name that only a run could give a meaning was asked for when there are no outputs.

    That is before the first run, and after one that ended before its step returned.
    """


class LifecycleError(TorchHooksError, RuntimeError):
    """A loop or a session was used after it stopped or closed, or inside its own run."""


class NanLossDuringTrainingError(TorchHooksError, RuntimeError):
    """The value that a NanTensorHook watches is not a number (``tf.train.NanLossDuringTrainingError``)."""


def add_note(error: BaseException, note: str) -> None:
    """Add ``note`` to ``error``, if its class lets that happen: what is told about an error must not replace it."""
    with contextlib.suppress(Exception):
        error.add_note(note)


def brief(error: BaseException) -> str:
    """``error`` in one line, also where its class cannot print it."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

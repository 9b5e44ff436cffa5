"""The exceptions that torchhooks defines, and what reports and collects exceptions.

    Exception
    ├── TorchHooksError
    │   ├── AbortedError                    raise it in a run to ask for recovery
    │   ├── CheckpointError                 a checkpoint cannot be written, read or loaded
    │   │   └── DamagedCheckpointError      a file of it is missing, truncated or modified
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

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class TorchHooksError(Exception):
    """Base class of the exceptions that torchhooks defines.

    >>> try:
    ...     with MonitoredLoop(step, model, optimizer, hooks=[LoggingTensorHook(["acc"], every_n_iter=1)]) as loop:
    ...         loss = loop.run(batches[0])
    ... except TorchHooksError as error:
    ...     print(f"{type(error).__name__}: {error}")
    FetchError: LoggingTensorHook(['acc'], every_n_iter=1) (hook 0) asked for 'acc', which does not exist. ...

    An invalid argument is a ``TypeError`` or a ``ValueError``, as everywhere in Python. An exception that the step, a
    hook or a function of the user raises keeps its type and its traceback: it is never wrapped in one of these.
    """


class AbortedError(TorchHooksError):
    """A run was cut short by something outside of it and may be retried (``tf.errors.AbortedError``).

    The library never raises it. Raise it in the step or in a hook, to have the loop restore the newest checkpoint and
    make the run again:

    >>> failures = iter([AbortedError("connection lost")])
    >>> def unreliable_step(inputs):
    ...     for error in failures:
    ...         raise error
    ...     return step(inputs)
    >>> saver = CheckpointSaverHook("run", save_steps=100)
    >>> with MonitoredLoop(unreliable_step, model, optimizer, hooks=[saver], checkpoint_dir="run") as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    saving a checkpoint of step 0 into run
    recovering now from AbortedError: connection lost (recovery 1 in a row)
    restored step 0 from run/model.ckpt-0
    saving a checkpoint of step 0 into run
    saving a checkpoint of step 8 into run

    The argument ``recoverable_errors`` of :class:`torchhooks.MonitoredLoop` names other exceptions to recover from.
    """


class CheckpointError(TorchHooksError):
    """A checkpoint cannot be written or read, or does not match the objects that it is loaded into.

    >>> path = Saver().save(Session(model), "run/model.ckpt", 100)
    >>> Saver().restore(Session(torch.nn.Linear(5, 1)), path)
    Traceback (most recent call last):
        ...
    torchhooks.CheckpointError: run/model.ckpt-100 does not match this session:
      model: of another shape than in the file: 'weight' (1, 5) instead of (1, 4)
    Make them match, or load what matches: MonitoredLoop(..., scaffold=Scaffold(saver=Saver(strict=False)))
    """


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, truncated or modified, or the path is not a checkpoint at all.

    A loop that starts skips a damaged checkpoint, with a warning, and restores the newest intact one. The error is
    raised if a damaged one is asked for by its path:

    >>> path = Saver().save(Session(model), "run/model.ckpt", 100)
    >>> with open(f"{path}/state.pt", "r+b") as file:
    ...     size = file.truncate(1000)
    >>> Saver().restore(Session(model), path)
    Traceback (most recent call last):
        ...
    torchhooks.DamagedCheckpointError: run/model.ckpt-100 is damaged: state.pt is cut short, ...
    """


class FeedError(TorchHooksError, RuntimeError):
    """A parameter of the step is fed twice: by two hooks, or by a hook and the caller of ``run``.

    >>> feed = FeedFnHook(lambda: {"inputs": batches[1]})
    >>> with MonitoredLoop(step, model, optimizer, hooks=[feed]) as loop:
    ...     loss = loop.run(batches[0])
    Traceback (most recent call last):
        ...
    torchhooks.FeedError: FeedFnHook(...) (hook 0) feeds 'inputs', which the caller of run() passed too: ...

    It is also raised if a hook feeds the body of ``loop.step()``, which has no parameters.
    """


class FetchError(TorchHooksError, LookupError):
    """A fetch has no value: its name is unknown, or this run did not produce it.

    The message names the hook that asked for the fetch, and lists what exists:

    >>> with MonitoredLoop(step, model, optimizer, hooks=[NanTensorHook("losss")]) as loop:
    ...     loss = loop.run(batches[0])
    Traceback (most recent call last):
        ...
    torchhooks.FetchError: NanTensorHook('losss') (hook 0) asked for 'losss', which ... Did you mean 'loss'? ...
    """


class NoRunYetError(FetchError):
    """A fetch that only a run can give a value is evaluated before the first run, or after one whose step failed.

    >>> with MonitoredLoop(step, model, optimizer) as loop:
    ...     loop.session.run("loss")
    Traceback (most recent call last):
        ...
    torchhooks.NoRunYetError: Session.run asked for 'loss', which does not exist. ...
    """


class LifecycleError(TorchHooksError, RuntimeError):
    """A loop or a session is used after it stopped or closed, or from inside its own run.

    >>> with MonitoredLoop(step, model, optimizer, hooks=[StopAtStepHook(last_step=2)]) as loop:
    ...     for inputs in batches:  # loop.until_stop(batches) ends when the loop stops
    ...         loss = loop.run(inputs)
    Traceback (most recent call last):
        ...
    torchhooks.LifecycleError: run() was called after a stop (StopAtStepHook: step 2): check should_stop() ...
    """


class NanLossDuringTrainingError(TorchHooksError, RuntimeError):
    """A value that a NanTensorHook watches is NaN or, if it looks for these, infinite.

    >>> try:
    ...     with MonitoredLoop(step, model, optimizer, hooks=[NanTensorHook("loss")]) as loop:
    ...         loss = loop.run(batches[0] * float("nan"))
    ... except NanLossDuringTrainingError as error:
    ...     print("failed:", error)
    loss is NaN at step 1: training fails
    failed: loss is NaN at step 1. NanTensorHook(..., fail_on_nan_loss=False) stops at such a step instead of failing.

    The name is TensorFlow's (``tf.train.NanLossDuringTrainingError``).
    """


class PeerError(TorchHooksError, RuntimeError):
    """The loop cannot continue because of another rank: it failed, it does not answer, or it ended too early.

    Every rank that is still running raises it, so that no process waits forever for another that has failed:

    >>> def main():
    ...     raise PeerError("rank 3 failed in run 12: OSError: disk full", rank=3, run=12, reason="OSError: disk full")
    >>> try:
    ...     main()  # a training run of several ranks
    ... except PeerError as error:
    ...     print(f"rank {error.rank}, run {error.run}: {error.reason}")
    rank 3, run 12: OSError: disk full

    It is not an :class:`torchhooks.AbortedError`: one process alone cannot recover. ``torchrun --max-restarts``
    restarts all processes.

    The arguments after the first are also attributes.

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
        # Both, also where a traceback would not show the context. Unlike chain(), this looks for an interrupt that an
        # error hides: code that raises "from None" has not handled a Ctrl-C.
        waiting += [link.__context__, link.__cause__]
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error``, the errors of a group, what it was raised from or while handling, like a printed traceback."""
    # By id, because an error may define __eq__ or have no hash. A chain can be a cycle, which code that sets __cause__
    # by hand makes.
    seen: set[int] = set()
    links = [] if error is None else [error]
    for link in links:
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        shows_context = link.__cause__ is None and not link.__suppress_context__
        before = link.__context__ if shows_context else link.__cause__
        links += [] if before is None else [before]  # extends the list that the loop iterates over
        links += link.exceptions if isinstance(link, BaseExceptionGroup) else []


def brief(error: BaseException) -> str:
    """Return the type and the message of ``error``; the type alone if it has no message or cannot be printed."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Attempts:
    """Collects the errors of several calls.

    Args:
        catch: the errors to collect; others propagate at once.
    """

    def __init__(self, catch: type[BaseException] = BaseException) -> None:
        self._catch = catch
        self.errors: list[BaseException] = []

    def __call__(self, function: Callable[..., object], *args: object) -> None:
        """Call ``function(*args)`` and collect its error."""
        try:
            function(*args)
        # By default, errors of every kind: a Ctrl-C in one call must not keep the calls after it from being made.
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


# A traceback prints the name by which users import an error.
# The values are copied, because the loop adds its variable to them.
for _error in [*globals().values()]:
    if isinstance(_error, type) and issubclass(_error, TorchHooksError):
        _error.__module__ = "torchhooks"

"""The raw session, which hooks get: it knows what there is and evaluates fetches. It calls no hooks."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torchhooks.checkpoint import Saver
from torchhooks.errors import FetchError, LifecycleError, NoRunYetError
from torchhooks.fetch import Evaluator, detached, map_leaves, watched_names
from torchhooks.hook import SessionRunContext
from torchhooks.log import logger
from torchhooks.readback import Elapsed, Moment
from torchhooks.stateful import Stateful

if TYPE_CHECKING:
    from torchhooks.position import Position

NO_OUTPUTS: Any = type("NoOutputs", (), {})()
"""What stands for the outputs before the first run, and from the moment a step begins until it returns."""
_LEFT_OUT: Any = type("LeftOut", (), {})()


_CPU = torch.device("cpu")


class DataWait:
    """How long the ``until_stop`` of one depth have waited for their data; ``None`` until somebody asks for it."""

    __slots__ = ("secs",)

    def __init__(self) -> None:
        self.secs: float | None = None


class Session:
    """The state of a training: model, optimizer, the step it has reached, and what the last run returned.

    Made by a loop; a hook gets it in ``after_create_session``, ``end`` and as ``run_context.session``.

    Args:
        model: what parameter names are looked up in.
        optimizer: where ``"lr"`` comes from.
        state: further objects that belong to the training.
        saver: what writes its checkpoints; a :class:`torchhooks.Saver` with its defaults if there is none.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        state: Mapping[str, Stateful] | None = None,
        saver: Any = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.state: Mapping[str, Stateful] = {} if state is None else state
        self.saver = Saver() if saver is None else saver
        self.hooks: Mapping[str, Stateful] = {}
        """The hooks that have a state, by the names under which it is kept in checkpoints."""
        self.hooks_elsewhere: Collection[str] = ()
        """The names of hooks that only another process has: their states in checkpoints are passed over."""
        self.checkpoint_dir: str | None = None
        """Where the loop restores from; ``None`` if it does not."""
        self.position: Position | None = None
        """How far the loop is in its data; ``None`` for a session without a loop."""
        self.savers: list[Any] = [self.saver]
        """What is waited for before anything is restored and when the loop closes: a hook adds its own saver."""
        self._refusals: list[Callable[[], str | None]] = []
        self._drain: Callable[[], object] = _nothing
        self._wake: Callable[[], object] = _nothing
        self._is_interrupted: Callable[[], bool] = bool
        # The loop reads and writes these on every run, past the checks of the property and of run().
        self._global_step = 0
        self._begun_at = 0
        self._outputs: Any = NO_OUTPUTS
        self._data_waits: dict[int, DataWait] = {}
        self._depth = 0
        self._pauses = 0
        self._pause_listeners: list[Callable[[Elapsed], object]] = []
        self._live: SessionRunContext | None = None  # the run under way, if somebody takes part in it
        self._stops: list[SessionRunContext] = []  # the runs in which, or after which, a stop was asked for
        self._closed = False
        self._inputs: Collection[str] = ()

    @property
    def global_step(self) -> int:
        """How many steps this training has made, in this process and those before. May be set."""
        return self._global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        try:
            number = operator.index(step)
        except TypeError:
            number = -1
        if number < 0:
            raise ValueError(f"global_step={step!r}: must be a whole number, 0 or more")
        self._global_step = number
        if self._outputs is NO_OUTPUTS:
            self._begun_at = number

    @property
    def begun_at(self) -> int:
        """The step from which this session counts: what was restored, or set before its first run; else 0."""
        return self._begun_at

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter or buffer is; without one, the CPU."""
        if self.model is not None:
            for tensor in itertools.chain(self.model.parameters(), self.model.buffers()):
                return tensor.device
        return _CPU

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A ``with`` block whose time is not counted as training: an evaluation, a checkpoint. Nests."""
        start = Moment(self.device)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                pause = Elapsed(start, Moment(self.device))
                for listener in self._pause_listeners:
                    listener(pause)

    def on_pause(self, listener: Callable[[Elapsed], object]) -> None:
        """Call ``listener`` with the length of each pause, when it ends: a value for ``when_ready``."""
        self._pause_listeners.append(listener)

    def guard_checkpoints(self, refusal: Callable[[], str | None]) -> None:
        """Have ``refusal`` asked before each checkpoint: it returns why the state is not worth keeping, or ``None``."""
        self._refusals.append(refusal)

    def why_no_checkpoint(self) -> str | None:
        """What speaks against a checkpoint of this moment, ``None`` if nothing does.

        Makes every ``when_ready`` call that has not been made yet, since one of them may be what does; so it waits.
        """
        self._drain()
        return next((reason for refusal in self._refusals if (reason := refusal()) is not None), None)

    def wait_for_savers(self) -> None:
        """Return once no checkpoint is being written any more; raise the error of one that could not be.

        Raises:
            CheckpointError: what a saver that writes behind could not write; several errors as an ExceptionGroup.
        """
        errors: list[Exception] = []
        for saver in self.savers:
            try:
                if hasattr(saver, "wait"):
                    saver.wait()
            except Exception as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup("several checkpoints were not written", errors)

    @property
    def interrupted(self) -> bool:
        """Whether the loop was sent a signal to stop: a hook that waits for something inside a run looks at it."""
        return self._is_interrupted()

    @property
    def data_wait_secs(self) -> float | None:
        """How long the innermost ``until_stop`` has waited for its data, in seconds; ``None`` if there is none.

        It is measured from the moment at which this is first asked for.
        """
        if not self._depth:
            return None
        wait = self._data_waits[self._depth]
        wait.secs = wait.secs or 0.0
        return wait.secs

    def run(self, fetches: Any, feed_dict: Mapping[str, Any] | None = None) -> Any:
        """Evaluate ``fetches`` now: no step is made, no hook is called (``tf.Session.run``).

        The names of outputs mean those of the last run. ``feed_dict`` gives names, and so parameters of closures,
        values for this call.

        Raises:
            FetchError: a name that nothing has, or one that means something only during a run.
            LifecycleError: the loop has been closed.
        """
        return self._evaluator(fetches, feed_dict).evaluate(fetches, "Session.run")

    def run_available(self, fetches: Any, feed_dict: Mapping[str, Any] | None = None, who: object = None) -> Any:
        """Like :meth:`run`, for a hook's ``end``: what only a run could give, and none did, is left out.

        An entry of a dict is dropped, anything else becomes ``None``; a warning says which.
        """
        evaluator = self._evaluator(fetches, feed_dict)
        who = "Session.run_available" if who is None else who

        def evaluate(fetch: Any) -> Any:
            try:
                return evaluator.evaluate(fetch, who)
            except NoRunYetError as error:
                logger.warning("%s It is left out.", error)
                return _LEFT_OUT

        return _without_left_out(map_leaves(evaluate, fetches))

    def _evaluator(self, fetches: Any, feed_dict: Mapping[str, Any] | None) -> Evaluator:
        if self._closed:
            raise LifecycleError(
                f"Session.run({fetches!r}): the loop of this session is closed, or has recovered and made another one, "
                "which is loop.session"
            )
        for name in watched_names(fetches):
            raise FetchError(
                f"Session.run asked for {name!r}, which is seen only while a step is made: return it from "
                "before_run, in SessionRunArgs"
            )
        ran = self._outputs is not NO_OUTPUTS
        outputs = detached(self._outputs) if ran else None
        evaluator = Evaluator(self, outputs, feed_dict or {})
        evaluator.ran, evaluator.gone = ran, self._inputs
        return evaluator


def _without_left_out(tree: Any) -> Any:
    if type(tree) is dict:
        return {key: _without_left_out(item) for key, item in tree.items() if item is not _LEFT_OUT}
    if type(tree) in (list, tuple):
        return type(tree)([_without_left_out(item) for item in tree])
    return map_leaves(lambda leaf: None if leaf is _LEFT_OUT else leaf, tree)


def _nothing() -> None:
    """What there is to wait for, or to wake, where there is no loop."""


class Scaffold:
    """The parts of a training that a session is created from (``tf.train.Scaffold``).

    Args:
        init_fn: ``init_fn(scaffold, session)``, called when a session starts without having been restored.
        summary_op: what a SummarySaverHook that was given this scaffold writes.
        saver: what writes and reads checkpoints, ``session.saver``.
        ready_fn: ``ready_fn(session)``, asked once the session is initialised or restored: True, or a text that says
            what is missing, which is then an error.
        copy_from_scaffold: another scaffold, which fills in what was not given here.
    """

    def __init__(
        self,
        init_fn: Callable[[Scaffold, Session], object] | None = None,
        summary_op: Any = None,
        saver: Any = None,
        ready_fn: Callable[[Session], bool | str] | None = None,
        copy_from_scaffold: Scaffold | None = None,
    ) -> None:
        if copy_from_scaffold is not None and not isinstance(copy_from_scaffold, Scaffold):
            raise TypeError(f"copy_from_scaffold={copy_from_scaffold!r}: must be a Scaffold")
        self.init_fn = init_fn
        self.summary_op = summary_op
        self.saver = saver
        self.ready_fn = ready_fn
        for name, value in vars(copy_from_scaffold).items() if copy_from_scaffold is not None else ():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def prepare(self, session: Session, restored: bool = False) -> None:
        """Initialise a fresh session, unless it was ``restored``, and make sure that it is ready.

        Raises:
            LifecycleError: ``ready_fn`` says that it is not.
        """
        if self.init_fn is not None and not restored:
            self.init_fn(self, session)
        ready = True if self.ready_fn is None else self.ready_fn(session)
        if ready is not True:
            missing = ready if isinstance(ready, str) and ready else f"ready_fn gave {ready!r}"
            raise LifecycleError(f"the session is not ready: {missing}")

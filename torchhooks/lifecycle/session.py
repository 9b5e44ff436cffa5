"""The raw session that hooks receive: it holds the training state and evaluates fetches. It calls no hooks."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, NamedTuple, Self

import torch

from torchhooks.checkpoints.contents import Gradients, Replicas, StatefulHook
from torchhooks.checkpoints.saver import Saver
from torchhooks.checkpoints.savers import Refusal, RestoresCheckpoints, savers_of, wait_for_savers
from torchhooks.common.errors import Attempts, FetchError, LifecycleError, NoRunYetError
from torchhooks.common.log import logger
from torchhooks.common.stateful import Stateful
from torchhooks.common.text import shortened, shown
from torchhooks.common.trees import map_leaves
from torchhooks.data.agenda import Agenda
from torchhooks.data.cursor import DataWaits
from torchhooks.data.position import DataPosition
from torchhooks.device.readback import DeviceDuration, DeviceTimestamp, Readback
from torchhooks.fetches.evaluation import Caller, Evaluator, watched_names
from torchhooks.fetches.names import Step, check_feed_names
from torchhooks.fetches.over_ranks import RanksEvaluator
from torchhooks.fetches.running import RunningValues
from torchhooks.progress.loop_state import NO_OUTPUTS, LoopState
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.ranks import LoopRanks, Ranks


class Finding(NamedTuple):
    """What a hook has found in a run, for the extensions of the loop: see :meth:`torchhooks.Extension.found`.

    >>> Finding(3, "loss is NaN at step 3", NanTensorHook("loss"), {}).message
    'loss is NaN at step 3'

    Args:
        step: the global step that the run made.
        message: what is wrong, in a sentence.
        hook: the hook.
        inputs: what the step got, by the names of its parameters; empty if the run is over, or in ``loop.step()``.
    """

    step: int
    message: str
    hook: object
    inputs: Mapping[str, object]


_LEFT_OUT: Any = type("LeftOut", (), {})()
_CPU = torch.device("cpu")


class Session(TrainingState):
    """The state of a training run: model, optimizer, global step, and the outputs of the last run.

    The loop creates it: ``loop.session``. A hook receives it in ``after_create_session`` and ``end``, and as
    ``run_context.session``. It calls no hooks. After a recovery the loop has a new one, and the old one is closed.

    >>> with MonitoredLoop(step, model, optimizer) as loop:
    ...     loss = loop.run(batches[0])
    ...     loop.session.run({"step": "global_step", "lr": "lr", "bias": lambda model: model.bias.shape})
    {'step': 1, 'lr': 0.1, 'bias': torch.Size([1])}
    """

    was_restored: bool
    """Whether this session began with a checkpoint."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        state: Mapping[str, Stateful] | None = None,
        saver: RestoresCheckpoints[Session] | None = None,
        *,
        hooks: Mapping[str, StatefulHook] | None = None,
        checkpoint_dir: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        gradients: Gradients | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Create a session without a loop, which holds what a Saver saves and restores.

        Args:
            model: the module in which parameter names are looked up.
            optimizer: the optimizer whose learning rate is ``"lr"``.
            state: further objects that belong to the training state, by name.
            saver: what writes its checkpoints; by default a Saver with its defaults.
            hooks: the hooks that have a state, by the name under which a checkpoint keeps it.
            checkpoint_dir: the folder from which the loop restores; ``None`` if it does not.
            metadata: plain data for every checkpoint.
            gradients: what the optimizer has not used yet; ``None`` if nothing watches the optimizer.
            ranks: which of several processes this is; by default, of the initialized ``torch.distributed``.
        """
        loop_state = LoopState()
        state = {} if state is None else state
        saver = Saver() if saver is None else saver
        super().__init__(
            model=model,
            optimizer=optimizer,
            state=state,
            saver=saver,
            hooks={} if hooks is None else hooks,
            metadata={} if metadata is None else metadata,
            checkpoint_dir=checkpoint_dir,
            saved_to=None,
            ranks=ranks if isinstance(ranks, LoopRanks) else LoopRanks(Ranks() if ranks is None else ranks),
            loop_state=loop_state,
            position=DataPosition(loop_state, state, resumes=False),
            gradients=gradients,
            unsaved=None,
            replicas=Replicas(),
            accumulated=RunningValues(),
            step_function=Step(None),
            agenda=Agenda(),
            data_waits=DataWaits(),
            readback=Readback(loop_state.set_pending),
            loop_hooks=(),
            savers=[saver],
            call_epoch_hooks=lambda: None,
            tell_extensions=lambda session, finding: None,
        )
        self._begin()

    @classmethod
    def of(cls, training: TrainingState) -> Self:
        """Return a new session of the loop that has ``training``: they share all that the loop keeps."""
        # Not by the constructor, which makes the parts of a session without a loop.
        session = cls.__new__(cls)
        for part in fields(TrainingState):
            if part.init:
                setattr(session, part.name, getattr(training, part.name))
        session._begin()  # noqa: SLF001 - its own class; last: what a session has for itself is not shared
        return session

    def _begin(self) -> None:
        self.was_restored = False
        self._began, self._paused_secs = time.monotonic(), 0.0
        # Decided here, so that nothing of several ranks is on the path of one.
        self.new_evaluator: type[Evaluator] = RanksEvaluator if self.ranks.may_have_dtensors else Evaluator
        self._guards: list[tuple[Refusal, Callable[[], str | Refusal | None] | None]] = []
        self._saved_listeners: list[Callable[[str], object]] = []
        self._error_listeners: list[Callable[[BaseException], object]] = []
        self._open_pauses = 0
        self._pause_listeners: list[Callable[[DeviceDuration], object]] = []
        self._closed = False

    def __repr__(self) -> str:
        named = [type(part).__name__ for part in (self.model, self.optimizer) if part is not None]
        parts = shortened([*named, *self.state, *self.hooks], 8)
        state = "closed" if self._closed else "open"
        return f"<Session at step {self.global_step}, {state}{': ' if parts else ''}{parts}>"

    def finish_epoch(self) -> None:
        """Make the calls of an epoch that the body left by ``break``, and all pending ``when_ready`` calls.

        For a hook whose results the code after the epoch reads. This waits for the device.
        """
        self.call_epoch_hooks()
        self.drain()

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU if there is none."""
        if self.model is not None:
            for tensor in itertools.chain(self.model.parameters(), self.model.buffers()):
                return tensor.device
        return _CPU

    def paused(self) -> AbstractContextManager[None]:
        """Do not count the time inside this ``with`` block as training time: an evaluation, a checkpoint. Nests.

        Rates such as steps per second leave it out, and so does :attr:`secs`. The periods of timers include it.
        """
        return _Pause(self._begin_pause, self._end_pause)

    def _begin_pause(self) -> DeviceTimestamp:
        start = DeviceTimestamp(self.device)
        self._open_pauses += 1
        return start

    def _end_pause(self, start: DeviceTimestamp) -> None:
        self._open_pauses -= 1
        if not self._open_pauses:
            pause = DeviceDuration(start, DeviceTimestamp(self.device))
            self._paused_secs += pause.host_secs
            for listener in self._pause_listeners:
                listener(pause)

    @property
    def expected_last_step(self) -> int | None:
        """The global step at which a StopAtStepHook or the end of the data will end the loop.

        ``None`` if it is not known. The lengths of the data tell it if each item has been one step so far. The first
        item alone does not show it if steps of the optimizer count: a step in every third item may begin with that one.
        """
        taken, total = self.position.all_items or (-1, 0)
        is_seen = taken == self.global_step and (taken > 1 or self.loop_state.steps_per_run == 1)
        by_data = total if is_seen and total < sys.maxsize else None
        ends = [by_data, *(hook.stops_at_step for hook in self.loop_hooks)]
        return min((each for each in ends if each is not None), default=None)

    @property
    def saved_step(self) -> int | None:
        """The step that a CheckpointSaverHook has saved last in this session. A thread may still be writing it."""
        steps = [hook.saved_step for hook in self.loop_hooks]
        return max((step for step in steps if step is not None), default=None)

    def on_pause(self, listener: Callable[[DeviceDuration], object]) -> None:
        """Call ``listener`` with the length of each pause when it ends. The length is a value for ``when_ready``."""
        self._pause_listeners.append(listener)

    def guard_checkpoints(
        self, refusal: Refusal, *, background_refusal: Callable[[], str | Refusal | None] | None = None
    ) -> None:
        """Ask ``refusal()`` before each checkpoint. It returns why the state must not be saved, or ``None``.

        Before a checkpoint that a background thread writes, ``background_refusal()`` is called instead, if given. It
        must not wait for the device. If the reason is still on the device, it returns a function, which the background
        thread calls before it writes anything, and which may wait.
        """
        self._guards.append((refusal, background_refusal))

    def on_checkpoint(self, listener: Callable[[str], object]) -> None:
        """Call ``listener(folder)`` after each save of a CheckpointSaverHook, which a thread may still be writing."""
        self._saved_listeners.append(listener)

    def checkpoint_saved(self, folder: str) -> None:
        """Call the listeners of :meth:`on_checkpoint`: a checkpoint was saved in ``folder``, an absolute path."""
        for listener in self._saved_listeners:
            listener(folder)

    def found(self, finding: Finding) -> None:
        """Tell the extensions of the loop what a hook has found, such as a NaN."""
        self.tell_extensions(self, finding)

    def on_error(self, listener: Callable[[BaseException], object]) -> None:
        """Call ``listener(error)`` when a run fails from which the loop does not recover."""
        self._error_listeners.append(listener)

    def run_failed(self, error: BaseException) -> None:
        """Call the listeners of :meth:`on_error`."""
        for listener in self._error_listeners:
            listener(error)

    def why_no_checkpoint(self, refusals: list[Refusal] | None = None) -> str | None:
        """Return the reason not to save a checkpoint now, or ``None``.

        Makes the pending ``when_ready`` calls first, because one of them may find the reason. This waits for the
        device.

        Args:
            refusals: for a checkpoint that a background thread writes. Those that the thread has to ask before it
                writes the checkpoint are appended. The host then waits for the device only if a guard has no
                ``background_refusal``, or if a hook has a state, which a ``when_ready`` call may change.
        """
        if refusals is None or self.hooks or any(in_background is None for _, in_background in self._guards):
            self.readback.drain()
            for refusal, _ in self._guards:  # not a generator, which would turn a StopIteration into a RuntimeError
                reason = refusal()
                if reason is not None:
                    return reason
            return None
        for _, in_background in self._guards:
            answer = in_background() if in_background is not None else None
            if isinstance(answer, str):
                return answer
            if answer is not None:
                refusals.append(answer)
        return None

    def at_stop(self, who: object, callback: Callable[[], object]) -> None:
        """Call ``callback()`` when ``until_stop`` notices a stop, before code after the ``for`` loop runs.

        A hook calls this in ``after_create_session``, and passes itself as ``who``, for notes on exceptions. If the
        body of the loop calls ``should_stop()`` first, the callback is called there too. It is not called if a callback
        that the hook gave to ``run_context.after_item`` was called for this item just before, and did not return
        ``False``.
        """
        self.agenda.at_stop(who, callback)

    def wait_for_savers(self) -> None:
        """Wait for pending checkpoint writes and raise any error they hit.

        Raises:
            CheckpointError: an asynchronous save failed; several errors are raised as an ExceptionGroup.
        """
        wait_for_savers(self)

    def close_savers(self, attempt: Attempts) -> None:
        """Close each saver, even if others cannot be closed. The loop calls this."""
        for saver in savers_of(self):
            attempt(saver.close)

    def measure_data_wait(self) -> float | None:
        """Return how long the ``until_stop`` loops have waited for their data, in seconds; ``None`` if there was none.

        Measuring begins with the first call, for the loops that are then open.
        """
        return self.data_waits.total()

    def run(self, fetches: Any, feed_dict: Mapping[str, Any] | None = None, who: object = None) -> Any:
        """Evaluate ``fetches`` now, without a step and without hooks (``tf.Session.run``).

        Names of outputs refer to the last run. Every rank has to call this for ``over_ranks`` and a ``DTensor``.

        Args:
            fetches: any fetch, of :doc:`this table </reference/fetches>`.
            feed_dict: values for names, and thereby for parameters of closures, in this call.
            who: the hook that asks, whose running fetches can then be evaluated. Errors name it.

        Raises:
            FetchError: an unknown name, or a name that has a value only during a run.
            LifecycleError: the loop is closed, or a recovery has replaced this session.
        """
        return self.evaluator_between_runs(fetches, feed_dict).evaluate(fetches, _caller(who, "Session.run"))

    def run_available(self, fetches: Any, feed_dict: Mapping[str, Any] | None = None, who: object = None) -> Any:
        """Evaluate ``fetches`` like :meth:`run`, but leave out what needs a run if there was none.

        For a hook's ``end``. A missing entry of a dict is dropped; any other missing value is ``None``. A warning names
        each of them.
        """
        evaluator = self.evaluator_between_runs(fetches, feed_dict)
        caller = _caller(who, "Session.run_available")

        def evaluate(fetch: Any) -> Any:
            try:
                return evaluator.evaluate(fetch, caller)
            except NoRunYetError as error:
                logger.warning("%s It is left out.", error)
                return _LEFT_OUT

        return _without_left_out(map_leaves(evaluate, fetches))

    def close(self) -> None:
        """Refuse further fetches and release the last outputs. The loop calls this."""
        self._closed = True
        self.loop_state.release_outputs()

    def evaluator_between_runs(self, fetches: Any, feed_dict: Mapping[str, Any] | None = None) -> Evaluator:
        """Return what evaluates ``fetches`` while no run is in progress. The loop and :meth:`run` use it."""
        if self._closed:
            raise LifecycleError(
                f"Session.run({shown(fetches)}): this session is closed, because its loop was closed or recovered: "
                "after a recovery, use loop.session"
            )
        feeds = {} if feed_dict is None else feed_dict
        check_feed_names(feeds, "Session.run")
        ran = self.loop_state.outputs is not NO_OUTPUTS
        evaluator = self.new_evaluator(self, self.loop_state.outputs if ran else None, feeds)
        evaluator.ran, evaluator.gone, evaluator.detaches = ran, self.step_function.parameters, True
        for name in watched_names(fetches):
            if not evaluator.is_given(name):
                raise FetchError(
                    f"Session.run asked for {name!r}, which has a value only during a step: request it in before_run, "
                    "with SessionRunArgs"
                )
        return evaluator


class _Pause:
    """The context manager of ``paused``. A generator would turn a listener's StopIteration into a RuntimeError."""

    def __init__(self, begin: Callable[[], DeviceTimestamp], end: Callable[[DeviceTimestamp], object]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._start = self._begin()

    def __exit__(self, *_: object) -> None:
        self._end(self._start)


def _caller(who: object, call: str) -> Caller:
    return Caller(name=call) if who is None else Caller(who)


def _without_left_out(tree: Any) -> Any:
    if type(tree) is dict:
        return {key: _without_left_out(item) for key, item in tree.items() if item is not _LEFT_OUT}
    if type(tree) in (list, tuple):
        return type(tree)([_without_left_out(item) for item in tree])
    return map_leaves(lambda leaf: None if leaf is _LEFT_OUT else leaf, tree)


class Scaffold:
    """The parts from which a session is created (``tf.train.Scaffold``).

    >>> pretrained = torch.nn.Linear(4, 1).state_dict()
    >>> def load(scaffold, session):
    ...     session.model.load_state_dict(pretrained)
    >>> scaffold = Scaffold(init_fn=load, saver=Saver(max_to_keep=2))
    >>> with MonitoredLoop(step, model, optimizer, scaffold=scaffold) as loop:
    ...     torch.equal(model.weight, pretrained["weight"])
    True

    Args:
        init_fn: called as ``init_fn(scaffold, session)`` when a session starts that was not restored.
        summary_op: what a :class:`torchhooks.SummarySaverHook` with this scaffold writes.
        saver: what writes and reads checkpoints, ``session.saver``; by default a :class:`torchhooks.Saver`. The hooks
            that save checkpoints use it if they get no saver of their own.
        ready_fn: called as ``ready_fn(session)`` once the session is initialized or restored. It returns True, or a
            text that says what is missing; the text becomes an error.
        copy_from_scaffold: another scaffold that supplies the arguments not given here.

    Raises:
        TypeError: ``copy_from_scaffold`` is not a Scaffold.
    """

    def __init__(
        self,
        init_fn: Callable[[Scaffold, Session], object] | None = None,
        summary_op: Any = None,
        saver: RestoresCheckpoints[Session] | None = None,
        ready_fn: Callable[[Session], bool | str] | None = None,
        copy_from_scaffold: Scaffold | None = None,
    ) -> None:
        if copy_from_scaffold is not None and not isinstance(copy_from_scaffold, Scaffold):
            raise TypeError(f"copy_from_scaffold={shown(copy_from_scaffold)}: must be a Scaffold")
        self.init_fn = init_fn
        self.summary_op = summary_op
        self.saver = saver
        self.ready_fn = ready_fn
        for name, value in vars(copy_from_scaffold).items() if copy_from_scaffold is not None else ():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def prepare(self, session: Session, restored: bool = False) -> None:
        """Initialise ``session`` unless it was ``restored``, and check that it is ready. The loop calls this.

        Raises:
            LifecycleError: ``ready_fn`` says that it is not.
        """
        if self.init_fn is not None and not restored:
            self.init_fn(self, session)
        ready = True if self.ready_fn is None else self.ready_fn(session)
        if ready is not True:
            missing = ready if isinstance(ready, str) and ready else f"ready_fn returned {shown(ready)}"
            raise LifecycleError(f"the session is not ready: {missing}")

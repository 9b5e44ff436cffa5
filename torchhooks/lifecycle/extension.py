"""Extensions: what joins every loop of a process, next to the hooks that the script gives to a loop.

A tool that watches a training run from outside is an :class:`Extension`. Its factory is registered once, usually when
its module is imported, and makes one extension for each loop. The loop calls its methods, and knows nothing else of it:

    plan                        when the loop is created, before the hooks know their folders, names and ranks
    begin                       before the hooks' begin, which may wait for other ranks
        start                   after each session was created, also by a recovery
            found               from a run: a hook has found what another tool should look into
        finish                  after the hooks' end, before their teardown
    close                       last, when the ranks have parted

``finish`` and ``close`` are called for each extension of which ``begin`` was called, also if that raised.

An extension never sees runs. One that needs them adds hooks in :meth:`Extension.plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

from torchhooks.checkpoints.folder import split_checkpoint
from torchhooks.common.errors import add_note
from torchhooks.common.text import shown
from torchhooks.lifecycle.hook import SessionRunHook
from torchhooks.lifecycle.session import Finding, Session
from torchhooks.lifecycle.settings import LoopSettings, check_signatures, check_together
from torchhooks.progress.training_state import TrainingState


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """What a loop begins with. An extension returns a copy with changes, as ``dataclasses.replace`` makes it.

    >>> from dataclasses import replace
    >>> plan = LoopPlan(hooks=(StopAtStepHook(last_step=5),))
    >>> replace(plan, last=(*plan.last, NanTensorHook("loss"))).all_hooks
    (StopAtStepHook(last_step=5), NanTensorHook('loss'))

    Args:
        hooks: the hooks of the script, which messages number from 0 on. An extension may leave some out.
        step: the step function of the script; ``None`` without one.
        folder: the loop's ``checkpoint_dir``, as the script writes it, if that is a folder; otherwise the folder of the
            checkpoint that it names. ``None`` without one.
        checkpoint: the name of the checkpoint to begin with; ``None`` for the newest one in ``folder``.
        counts_runs: whether each run makes one global step, and not the steps of the optimizer.
        first, last: the hooks of extensions, which are called before and after those of the script.
        most_items: ``(depth, items)``, a limit of the items of all ``until_stop`` of one depth, from 1 on; ``None`` for
            no limit.
    """

    hooks: tuple[SessionRunHook, ...] = ()
    step: Callable[..., Any] | None = None
    folder: str | None = None
    checkpoint: str | None = None
    counts_runs: bool = True
    first: tuple[SessionRunHook, ...] = ()
    last: tuple[SessionRunHook, ...] = ()
    most_items: tuple[int, int] | None = None

    @cached_property
    def all_hooks(self) -> tuple[SessionRunHook, ...]:
        """All hooks, in the order of every call."""
        return (*self.first, *self.hooks, *self.last)

    @cached_property
    def savers(self) -> list[SessionRunHook]:
        """The hooks that save checkpoints."""
        return [*filter(attrgetter("saves_checkpoints"), self.all_hooks)]

    @cached_property
    def has_checkpoints(self) -> bool:
        """Whether checkpoints are saved or restored."""
        return self.folder is not None or bool(self.savers)


class Extension:
    """Joins one loop, next to its hooks. Each method does nothing unless a subclass overrides it.

    >>> class Announce(Extension):
    ...     def start(self, session):
    ...         print("a loop begins at step", session.global_step)
    ...
    ...     def close(self, reason, failed):
    ...         print("it has ended:", reason)
    >>> @register_extension
    ... def make(plan):
    ...     return Announce()
    >>> with MonitoredLoop(step, model, optimizer, hooks=[StopAtStepHook(last_step=2)]) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)
    a loop begins at step 0
    it has ended: StopAtStepHook: step 2
    >>> unregister_extension(make)

    The extension that was registered first is the outermost, as the tools of torchhooks are: it plans last, so that it
    sees the hooks of all others, begins first, and closes last.

    An exception of :meth:`plan`, :meth:`begin` or :meth:`start` is one of the loop's constructor, or of the run from
    which the loop recovers. One of :meth:`finish` or :meth:`close` is raised when the loop is closed, after everything
    else was closed. One of :meth:`found` is logged, so that it does not take the place of what was found.
    """

    def plan(self, plan: LoopPlan) -> LoopPlan:
        """Called first: return what the loop begins with, which is ``plan`` or a copy of it with changes.

        Keep the hooks that other extensions have put into ``plan.first`` and ``plan.last``.
        """
        return plan

    def begin(self, training: TrainingState, settings: LoopSettings) -> None:
        """Called before the hooks' ``begin``, when the other ranks were reached. Open files, start threads.

        ``training`` is what the loop shares with all of its sessions: the step, the position in the data, the folders,
        the ranks. ``settings`` are the arguments of the loop, checked, by the same names.
        """

    def start(self, session: Session) -> None:
        """Called for every new session, after the hooks' ``after_create_session``; again after a recovery."""

    def found(self, session: Session, finding: Finding) -> None:
        """Called in a run when a hook has found something, such as a NaN. On a device, some runs later."""

    def finish(self, reason: str, failed: bool) -> None:
        """Called before the hooks' ``teardown``. ``reason`` says why the loop has ended, ``failed`` if by an error."""

    def close(self, reason: str, failed: bool) -> None:
        """Called last, with what :meth:`finish` got, or with an error that came after it. Close what was opened."""


Factory = Callable[[LoopPlan], Extension | None]
"""Returns the extension of a loop that is created; ``None`` for a loop that gets none."""
F = TypeVar("F", bound=Factory)

_factories: list[Factory] = []


def register_extension(factory: F) -> F:
    """Have every loop that is created from now on ask ``factory(plan)`` for an :class:`Extension`. A decorator, too.

    The factory returns a new extension for the loop, or ``None`` if the loop gets none.

    Raises:
        TypeError: ``factory`` cannot be called.
    """
    if isinstance(factory, Extension):
        raise TypeError(f"{shown(factory)} is an extension: give a function that makes one for each loop")
    if not callable(factory):
        raise TypeError(f"register_extension({shown(factory)}): give a function that makes an Extension for a LoopPlan")
    _factories.append(factory)
    return factory


def unregister_extension(factory: Factory) -> None:
    """Have no further loop ask ``factory``. Loops that were created keep their extensions.

    Raises:
        ValueError: it is not registered.
    """
    if factory not in _factories:
        raise ValueError(f"unregister_extension({shown(factory)}): it is not registered")
    _factories.remove(factory)


def planned(settings: LoopSettings) -> tuple[LoopPlan, tuple[Extension, ...]]:
    """Return what a loop with these ``settings`` begins with, and the extensions of the loop.

    The extension that was registered first is the outermost: it plans last, so that it sees the hooks of all others.

    Raises:
        TypeError, ValueError: a factory or an extension returned something else than it has to.
    """
    folder, checkpoint = (None, None) if settings.checkpoint_dir is None else split_checkpoint(settings.checkpoint_dir)
    plan = LoopPlan(
        hooks=settings.hooks,
        step=settings.step.given,
        folder=folder,
        checkpoint=checkpoint,
        counts_runs=settings.step_unit == "run",
    )
    extensions: list[Extension] = []
    for factory in reversed(_factories):
        extension = factory(plan)
        if extension is None:
            continue
        if not isinstance(extension, Extension):
            raise TypeError(f"the factory {shown(factory)} returned {shown(extension)}: return an Extension, or None")
        changed = called(extension, extension.plan, plan)
        if not isinstance(changed, LoopPlan):
            raise TypeError(
                f"plan of {shown(extension)} returned {shown(changed)}: return the plan that it got, or another "
                "LoopPlan, such as dataclasses.replace(plan, last=(*plan.last, hook))"
            )
        _check_plan(extension, plan, changed)
        plan = changed
        extensions.append(extension)
    if added := (*plan.first, *plan.last):  # the hooks of the script were checked with its other arguments
        check_signatures({f"hook {index} of an extension is a": hook for index, hook in enumerate(added)})
        check_together(plan.all_hooks, settings.ranks)
    return plan, tuple(reversed(extensions))


def _check_plan(extension: Extension, before: LoopPlan, plan: LoopPlan) -> None:
    """Raise unless ``extension`` may have made ``plan`` out of the plan ``before``."""
    what = f"plan of {shown(extension)} returned a plan with"
    for name in ("step", "folder", "counts_runs"):
        if getattr(plan, name) not in (getattr(before, name),):  # the same object, or an equal one
            raise ValueError(
                f"{what} {name}={shown(getattr(plan, name))}: {name} says what the script has given. An extension can "
                "change hooks, first, last, checkpoint and most_items"
            )
    for name in ("first", "hooks", "last"):
        if not isinstance(getattr(plan, name), tuple):
            raise TypeError(f"{what} {name}={shown(getattr(plan, name))}: it must be a tuple of hooks")
    for index, hook in enumerate(plan.all_hooks):
        if not isinstance(hook, SessionRunHook):
            raise TypeError(f"{what} {shown(hook)} as a hook: a hook is an instance of SessionRunHook")
        if any(hook is other for other in plan.all_hooks[:index]):
            raise ValueError(f"{what} {shown(hook)} twice: the loop would call it twice")
    if plan.checkpoint is not None and (not isinstance(plan.checkpoint, str) or plan.folder is None):
        raise ValueError(f"{what} checkpoint={shown(plan.checkpoint)}: it must be the name of a checkpoint in folder")
    limit: object = plan.most_items
    if limit is not None and not (
        isinstance(limit, tuple) and len(limit) == 2 and all(isinstance(each, int) and each > 0 for each in limit)
    ):
        raise ValueError(f"{what} most_items={shown(limit)}: it must be (depth, items), both from 1 on, or None")


_R = TypeVar("_R")


def called(extension: Extension, method: Callable[..., _R], *args: object) -> _R:
    """Return what the ``method`` of ``extension`` returns. An exception gets a note that names both."""
    try:
        return method(*args)
    except BaseException as error:
        name = getattr(method, "__name__", "a method")  # a partial has none
        add_note(error, f"torchhooks: in {name} of {type(extension).__name__}")
        raise

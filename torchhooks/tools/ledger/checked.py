"""The script's side of ``python -m torchhooks check``: what a loop gets in a process that ``check`` has started.

``check`` names a file in an environment variable, which the loop looks for when it is created. The script itself is
unchanged. Each loop gets a :class:`torchhooks.LedgerHook` of everything before its hooks, and a hook after them that
ends the process after so many runs, or kills it in one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from typing import Any, ClassVar, NoReturn

import torch

from torchhooks.common.files import placed, replacing
from torchhooks.common.random_states import random_states, set_random_states
from torchhooks.common.timers import EveryEpochs, EverySteps
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.extension import LoopPlan
from torchhooks.lifecycle.hook import PeriodicHook, SessionRunContext, SessionRunHook, SessionRunValues
from torchhooks.lifecycle.session import Session
from torchhooks.tools.ledger import as_main
from torchhooks.tools.ledger.hook import WHAT, LedgerHook
from torchhooks.tools.ledger.walk import Held, Walker, append

# Before so many runs of a process, it is read in any case. What still has another value before the second run was not
# made again by the script.
_FIRST_RUNS = 2
_WALK_SECS = 3.0
_POLL_SECS = 0.005


@dataclass
class ProcessPlan:
    """What happens in one process of a script.

    Args:
        ledger: the folder of the ledger.
        steps: after how many runs of the whole training run the process ends.
        kill_after: the number of the run after which a signal is sent to the process; 0 for none.
        kill_by: the number of the signal.
        depth, epoch_items: how many items the loops of one depth take at most; 0 for no limit.
        seen: the file in which the process tells the next ones what it has seen.
        walk: the file of what the script holds, to which each process appends.
        moments: the runs before which it is read, next to the first two of the process, and to each one as long as that
            takes no more than a few seconds in all.
        keeper: the number of the process that has started this one, unless the script itself has; 0 for any.
        over: the file that a process makes which the script itself has started, when it has to be ended with the rest.
        places, folders: the folder in which others are placed, and those that earlier processes have placed there.
        written, connected: the files in which it is noted which files the script itself opens for writing, and to
            which other machines it opens connections.
        stacks: the beginning of the path to which a process writes where its threads stand.
        began: when the process was started, in seconds since 1970.
    """

    ledger: str
    steps: int
    seen: str
    walk: str
    moments: list[int] = field(default_factory=list)
    kill_after: int = 0
    kill_by: int = int(signal.SIGKILL)
    depth: int = 0
    epoch_items: int = 0
    keeper: int = 0
    over: str = ""
    places: str = ""
    folders: list[str] = field(default_factory=list)
    written: str = ""
    connected: str = ""
    stacks: str = ""
    began: float = 0.0

    def write(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, path: str) -> ProcessPlan:
        with open(path, encoding="utf-8") as file:
            return cls(**json.load(file))

    @property
    def starts_this_process(self) -> bool:
        """Whether this process is one that ``check`` has started, and none that the script has."""
        # The keeper forks each process of the script, and a fork that becomes a new Python keeps its parent.
        return self.keeper in (0, os.getppid())


@dataclass
class Seen:
    """What a process has seen of the script.

    Args:
        loops, runs: how many loops and runs it made.
        depth: how many loops of ``until_stop`` were open around a run.
        saves: whether a hook saves checkpoints.
        restores: whether a loop has a ``checkpoint_dir``.
        resumed_at: the number of the last run in the checkpoint that the first loop continued from; 0 without one.
        folders: what torchhooks writes to, as the script names it.
        checkpoint_dirs: those of its loops.
        process: the number of the process.
        is_started_by_script: whether the script has started it.
        is_one_of_several: whether another process has made a loop, and both say that they are the first rank.
        secs: how long it took until the first loop had its session.
    """

    loops: int = 0
    runs: int = 0
    depth: int = 0
    saves: bool = False
    restores: bool = False
    resumed_at: int = 0
    folders: list[str] = field(default_factory=list)
    checkpoint_dirs: list[str] = field(default_factory=list)
    process: int = 0
    is_started_by_script: bool = False
    is_one_of_several: bool = False
    secs: float = 0.0

    @classmethod
    def read(cls, path: str) -> Seen:
        try:
            with open(path, encoding="utf-8") as file:
                return cls(**json.load(file))
        except (OSError, ValueError):  # no loop was made, or the process was killed while it wrote
            return cls()


def watched(loop: LoopPlan, file: str) -> LoopPlan:
    """Return what a loop begins with under ``check``, which has written ``file`` for this process."""
    plan = ProcessPlan.read(file)
    tell_of_saves()
    first, hooks, last = (
        tuple(hook for hook in given if not leaves_machine(hook)) for given in (loop.first, loop.hooks, loop.last)
    )
    own = [*first, *hooks, *last]
    for hook in own:
        # A hook that saves at the end of an epoch keeps its timer: long epochs are shortened by most_items.
        if hook.saves_checkpoints and isinstance(hook, PeriodicHook) and not isinstance(hook.timer, EveryEpochs):
            _save_often(hook, max(plan.steps // 10, 1))
    # The ledger is first, so that it reads the inputs and the random states before another hook can change them. Cut is
    # last: when it ends the process, all other hooks have had the run, a saver among them.
    return replace(
        loop,
        hooks=hooks,
        first=(LedgerHook(plan.ledger, what=WHAT), *first),
        last=(*last, Cut(plan, own, loop.step)),
        most_items=(plan.depth, plan.epoch_items) if plan.epoch_items else loop.most_items,
    )


def leaves_machine(hook: SessionRunHook) -> bool:
    """Return whether ``hook`` writes to another machine, as its attribute ``leaves_machine`` says."""
    return bool(getattr(hook, "leaves_machine", False))


def tell_of_saves() -> None:
    """Have ``torch.save`` tell where the script itself saves: C++ opens the file, and Python is not asked."""
    save = torch.save
    opened = as_main.opened_by_c
    # Each loop comes here, and torch.save must not be wrapped twice.
    if opened is None or hasattr(save, "is_of_check"):
        return

    @wraps(save)
    def told(obj: object, f: Any, *args: Any, **keywords: Any) -> None:
        save(obj, opened(f) if isinstance(f, (str, os.PathLike)) else f, *args, **keywords)

    told.is_of_check = True  # type: ignore[attr-defined]
    torch.save = told


def _save_often(hook: PeriodicHook, steps: int) -> None:
    """Have ``hook`` save within the few runs that are made, if its own period is longer."""
    if hook.timer.every_steps is None or hook.timer.every_steps > steps:
        hook.set_timer(EverySteps(steps))


class Cut(SessionRunHook):
    """Ends the process after the last run, as a kill would, so that no code after a stop makes a difference.

    With several ranks, each makes its runs and ends, and the first one writes what was seen.
    """

    # Of the process and not of one loop: a script may make several loops, and their runs are counted in one row.
    _seen: ClassVar[Seen] = Seen()
    _runs_of_earlier_loops: ClassVar[int] = 0
    _walker: ClassVar[Walker] = Walker()
    _walk_secs: ClassVar[float] = 0.0

    def __init__(self, plan: ProcessPlan, hooks: list[SessionRunHook], step: object) -> None:
        self._plan, self._hooks, self._step = plan, hooks, step
        seen = self._seen
        seen.loops += 1
        seen.saves = seen.saves or any(hook.saves_checkpoints for hook in hooks)
        seen.process, seen.is_started_by_script = os.getpid(), not plan.starts_this_process
        self._total = 0
        self._is_over = False
        self._is_chief = os.environ.get("RANK", "0") == "0"  # until there is a session, which may never be

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        seen = self._seen
        if session.checkpoint_dir is not None:
            seen.restores = True
            folder = os.path.relpath(session.checkpoint_dir, self._plan.places)
            if not folder.startswith(os.pardir):
                seen.checkpoint_dirs += [os.path.join(os.sep, folder)]
        if seen.loops == 1:
            seen.resumed_at = session.total_runs
            seen.secs = seen.secs or time.time() - self._plan.began
        self._total = session.total_runs  # also of a loop that has finished in an earlier process
        self._is_chief = session.ranks.rank == 0
        self._write()

    def before_run(self, run_context: SessionRunContext) -> None:
        session, plan = run_context.session, self._plan
        if self._is_over:
            self._end(session)
        # A run that is repeated on the way to the loop of the checkpoint is undone there, so it has no number.
        if session.position.is_repeating:
            return
        run = self._runs_of_earlier_loops + session.total_runs + 1
        is_wanted = run in plan.moments or Cut._walk_secs < _WALK_SECS or run == plan.steps
        if is_wanted or self._seen.runs < _FIRST_RUNS:
            self._walk(session, run)

    def _walk(self, session: Session, run: int) -> None:
        started = time.perf_counter()
        states = random_states()
        parts = {"model": session.model, "optimizer": session.optimizer, **session.state}
        position = session.position
        held = Held(
            sys._getframe(),  # noqa: SLF001 - as logging does
            {name: part for name, part in parts.items() if part is not None},
            self._hooks,
            self._step,
            position.current_item if position.depth else None,
        )
        # On all ranks: a state_dict() may need them.
        moment, nodes = self._walker.read(held, run, is_first=not self._seen.runs)
        set_random_states(states)  # a state_dict() of the user may draw
        if self._is_chief:
            if session.ranks.size > 1:
                moment = moment._replace(unseen=[*moment.unseen, "what ranks other than 0 hold"])
            append(self._plan.walk, moment, nodes)
        Cut._walk_secs += time.perf_counter() - started

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        self._total = session.total_runs
        made = self._runs_of_earlier_loops + self._total
        self._seen.runs += 1
        self._seen.depth = max(self._seen.depth, session.position.depth)
        if made == self._plan.kill_after and not self._seen.depth:
            # Without until_stop, a checkpoint is saved in the run. What the body does after it, such as print, would be
            # lost.
            self._is_over = True
        elif made == self._plan.kill_after or made >= self._plan.steps:
            self._end(session)

    def _end(self, session: Session) -> None:
        session.drain()  # what is on its way from a device to the ledger, and to what is printed
        self._write()
        # What is in a buffer is lost by os._exit() and by SIGKILL. What the script prints is compared.
        sys.stdout.flush()
        session.ranks.gather(None, "the last run under check")  # a rank that still needs this one would miss it
        plan = self._plan
        is_killed = self._runs_of_earlier_loops + self._total == plan.kill_after
        if is_killed and plan.kill_by != signal.SIGKILL:
            # After a stop by a signal, the script goes on: its loop saves and is closed. The next before_run() must not
            # end the process.
            self._is_over = False
            os.kill(os.getpid(), plan.kill_by)
        elif not plan.starts_this_process:
            self._wait_for_the_end(session)
        elif is_killed:
            os.kill(os.getpid(), plan.kill_by)
        else:
            os._exit(0)

    def _wait_for_the_end(self, session: Session) -> NoReturn:
        """Have all that the script has started be ended at once: what has started this process would see an error."""
        parent = os.getppid()
        if session.ranks.rank == 0:
            with open(self._plan.over, "w", encoding="utf-8"):
                pass
        while os.getppid() == parent:
            time.sleep(_POLL_SECS)
        os._exit(0)

    def teardown(self) -> None:
        Cut._runs_of_earlier_loops += self._total
        self._write()

    def _write(self) -> None:
        if self._is_chief:
            self._seen.folders = sorted(placed)
            if Seen.read(self._plan.seen).process not in (0, os.getpid()):
                self._seen.is_one_of_several = True
            # A script may start several processes that are all the first rank.
            temporary = f"{self._plan.seen}.{os.getpid()}"
            with replacing(self._plan.seen, temporary), open(temporary, "w", encoding="utf-8") as file:
                json.dump(asdict(self._seen), file)

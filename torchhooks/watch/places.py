"""Where the training thread of a loop is, by its stack, and what has become of the child processes.

The stack says it without any help of the training thread, so an idle run does nothing for it.
"""

from __future__ import annotations

import multiprocessing.process
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torchhooks.lifecycle.hook import SessionRunContext
from torchhooks.lifecycle.loop_state import RUNNING, LoopState

IN_STEP = "in the step"
WAITS_FOR_DATA = "waits for data"
WAITS_FOR_RANKS = "waits for the other ranks"
IN_SCRIPT = "in code of the script"

NOT_WAITING, AT_MEETING, IN_COLLECTIVE = range(3)
"""Whether a rank waits for others: no, in a call of torchhooks, or in one of torch."""

_DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy"}
# Functions between a call in the script and what it calls. Their names say nothing.
_WRAPPERS = {"wrapper", "decorate_context", "_wrapped_call_impl", "_call_impl"}
_COLLECTIVES = ("torch.distributed", "torch.nn.parallel.distributed")
_HOOK_METHODS = {
    "_begin_due": "before_run",
    "_after_run": "after_run",
    "_call_watchers": "before_run",
    "run_epoch_hooks": "the end of the epoch",
}
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep, "<frozen")


class Place(NamedTuple):
    """Where a training thread is."""

    phase: str
    """What the loop does: IN_STEP, for example, or ``"in after_run of EvaluationHook"``."""
    where: str
    """The line of the script, and what it calls there: ``"all_reduce, train.py:88 (step)"``."""
    waits: int
    is_in_debugger: bool
    run_counts: bool
    """Whether the run in progress is counted already, because its step is over."""

    @property
    def is_slow(self) -> bool:
        """Whether the loop is in what may take long: an evaluation, a save, a hook, or code of the script."""
        return not self.phase.startswith((IN_STEP, WAITS_FOR_DATA, WAITS_FOR_RANKS))


def locate(frame: FrameType, state: LoopState, depth: int) -> Place:
    """Return where the thread is whose innermost frame is ``frame``: the training thread of the loop with ``state``.

    ``depth`` is how many ``until_stop`` are open.
    """
    phase, where, function, waits, is_in_debugger, run_counts = "", "", "", NOT_WAITING, False, False
    # The innermost frame of the script is the line that hangs, and the innermost one of torchhooks says in what.
    for each in _outwards(frame):
        module, code = str(each.f_globals.get("__name__", "")), each.f_code
        is_in_debugger = is_in_debugger or module.partition(".")[0] in _DEBUGGERS
        if code.co_filename.startswith(_PACKAGE):
            if not where and not waits and module.startswith("torchhooks.ranks."):
                waits = AT_MEETING
            run_counts = run_counts or (module, code.co_name) == ("torchhooks.loop.runner", "_after_run")
            phase = phase or _phase_at(module, code.co_name, code.co_qualname, state, depth)
        elif not where and _is_of_script(code.co_filename):
            where = f"{os.path.basename(code.co_filename)}:{each.f_lineno} ({code.co_name})"
        elif not where:
            if code.co_name not in _WRAPPERS:
                function = code.co_qualname
            # Autograd calls the hooks of DistributedDataParallel without a frame of Python.
            if module.startswith(_COLLECTIVES) or code.co_name == "_engine_run_backward":
                waits = IN_COLLECTIVE
    if not phase:
        phase = IN_STEP if state.phase is RUNNING else IN_SCRIPT
        if waits == AT_MEETING:
            phase = WAITS_FOR_RANKS
    return Place(phase, ", ".join(filter(None, (function, where))), waits, is_in_debugger, run_counts)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _phase_at(module: str, name: str, qualname: str, state: LoopState, depth: int) -> str:
    """Return what a frame of torchhooks says of the phase; ``""`` if it says nothing."""
    match module.removeprefix("torchhooks."), name:
        case "checkpoints.saver", _:
            return "in a restore" if "restore" in qualname else "in a save"
        case "hooks.evaluation", "_evaluate":
            return "in an evaluation"
        case "loop.until_stop", "_items":
            return f"{WAITS_FOR_DATA} at depth {depth}"
        case "loop.runner", _ if name in _HOOK_METHODS and isinstance(state.context, SessionRunContext):
            return f"in {_HOOK_METHODS[name]} of {type(state.context.caller.hook).__name__}"
        case "loop.monitored_loop", "_start":
            return "creates the loop"
        case "loop.monitored_loop", "_close_everything":
            return "closes the loop"
    return ""


def _is_of_script(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and not {"site-packages", "dist-packages"} & {*Path(file).parts}


def format_stacks() -> str:
    """Return the stacks of all Python threads, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda each: each[0] != threading.main_thread().ident)  # noqa: SLF001 - CPython's
    return "\n".join(
        f"Thread {names.get(ident, 'unknown')} ({ident}):\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
    )


class Child(NamedTuple):
    """A process that this one has started, such as a worker of a DataLoader."""

    text: str
    is_well: bool


def children() -> list[Child]:
    """Return the child processes that multiprocessing knows, also the ones that have ended without being waited for."""
    return [_child(each) for each in _known_children()]


def kill_workers() -> None:
    """Kill the daemonic child processes: one that is stopped would not notice that this process has ended."""
    for each in _known_children():
        if each.daemon and _exit_code(each) is None:
            each.kill()


def _known_children() -> list[BaseProcess]:
    # active_children() would collect what has ended, and torch would not find out any more why its worker has.
    known: set[BaseProcess] = getattr(multiprocessing.process, "_children", set())
    return sorted([*known], key=lambda child: child.name)


def _child(process: BaseProcess) -> Child:
    name, code = f"worker {process.name} (pid {process.pid})", _exit_code(process)
    if code is not None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return Child(f"{name} {how}", is_well=False)
    state = ""  # without /proc
    with suppress(OSError):
        state = Path(f"/proc/{process.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    problems = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for a disk"}
    others = {"R": "is alive and runs", "S": "is alive and sleeps"}
    return Child(f"{name} {(problems | others).get(state, 'is alive')}", state not in problems)


def _exit_code(process: BaseProcess) -> int | None:
    """Return how ``process`` has ended, as ``exitcode`` says it, without collecting it; ``None`` if it has not."""
    if process.pid is not None and hasattr(os, "waitid"):
        with suppress(ChildProcessError):  # it is a child of multiprocessing's server, or was collected
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return process.exitcode

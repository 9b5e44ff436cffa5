"""Where the training thread of a loop is, by its stack, and what has become of the child processes.

The stack says it without any help of the training thread, so an idle run does nothing for it.
"""

from __future__ import annotations

import builtins
import dis
import multiprocessing.process
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from io import TextIOWrapper
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import NamedTuple

from torchhooks.common.processes import process_state
from torchhooks.common.user_code import is_own_file
from torchhooks.lifecycle.hook import SessionRunContext
from torchhooks.progress.loop_state import RUNNING, LoopState

IN_STEP = "in the step"
WAITS_FOR_DATA = "waits for data"
WAITS_FOR_RANKS = "waits for the other ranks"
WAITS_FOR_DEVICE = "waits for the device"
IN_SCRIPT = "in code of the script"

NOT_WAITING, AT_MEETING, IN_COLLECTIVE = range(3)
"""Whether a rank waits for others: no, in a call of torchhooks, or in one of torch."""

_DEBUGGERS = ("bdb.", "pdb.", "pydevd.", "_pydevd_bundle.", "debugpy.")
_PROMPTS = ("code.", "getpass.", "click.termui.", "prompt_toolkit.", "ipykernel.")
# Functions between a call in the script and what it calls. Their names say nothing.
_WRAPPERS = {"wrapper", "decorate_context", "_wrapped_call_impl", "_call_impl"}
_COLLECTIVES = ("torch.distributed", "torch.nn.parallel.distributed")
# The functions below are known by their names. If one is renamed, a report only says less, without an error. So a test
# looks for each of them.
HOOK_METHODS = {
    "torchhooks.loop.runner.Runner._begin_due": "before_run",
    "torchhooks.loop.runner.Runner._call_watchers": "before_run",
    "torchhooks.loop.runner.Runner._after_run": "after_run",
    "torchhooks.loop.epoch_end.EpochEnd._call": "the end of the epoch",
}
"""The functions that call a method of the hooks in a run, and its name."""
HOOK_CALL = "torchhooks.loop.sessions.Sessions.call"
"""The function that calls a method of a hook outside of a run. Its locals ``slot`` and ``name`` say which."""
ITEMS = "torchhooks.loop.until_stop.DataLoops._items"
EVALUATE = "torchhooks.hooks.evaluation.EvaluationHook._evaluate"
OUTSIDE = {
    "torchhooks.loop.life.Life.start": "creates the loop",
    "torchhooks.loop.life.Life.close": "closes the loop",
}
"""The functions from which no run is made, and what they do."""
RUN_PARTS = {
    "torchhooks.loop.runner.Runner._evaluate": "in a fetch",
    "torchhooks.loop.boundaries.Boundaries.end_run": "at the end of the run",
}
"""What a run does in these functions, unless one of those above says it more exactly."""
AFTER_STEP = ("torchhooks.loop.runner.Runner._after_run", "torchhooks.loop.boundaries.Boundaries.end_run")
"""The functions that are called in a run which is counted already."""
_LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep, "<frozen")


class Place(NamedTuple):
    """Where a training thread is."""

    phase: str
    """What the loop does: IN_STEP, for example, or ``"in after_run of EvaluationHook"``."""
    where: str
    """The line of the script, and what it calls there: ``"all_reduce, train.py:88 (step)"``."""
    waits: int
    run_counts: bool
    """Whether the run in progress is counted already, because its step is over."""
    is_outside: bool
    """Whether the loop is being created or closed, so that no run is in progress."""

    @property
    def is_slow(self) -> bool:
        """Whether the loop is in what may take long: an evaluation, a save, a hook, or code of the script."""
        return not self.phase.startswith((IN_STEP, WAITS_FOR_DATA, WAITS_FOR_RANKS, WAITS_FOR_DEVICE))


def locate(frame: FrameType, state: LoopState, depth: int) -> Place:
    """Return where the thread is whose innermost frame is ``frame``: the training thread of the loop with ``state``.

    ``depth`` is how many ``until_stop`` are open.
    """
    phase, where, function, waits = "", "", "", NOT_WAITING
    waits_for_device, run_counts, is_outside = False, False, False
    package = part = ""  # the module of the innermost frame of torchhooks, and the part of the run
    # The innermost frame of the script is the line that hangs, and the innermost one of torchhooks says in what.
    for each in _outwards(frame):
        module, code = str(each.f_globals.get("__name__", "")), each.f_code
        if is_own_file(code.co_filename):
            if not where and not waits and module.startswith("torchhooks.ranks."):
                waits = AT_MEETING
            waits_for_device = waits_for_device or (not (where or package) and module.startswith("torchhooks.device."))
            package = package or module
            name = f"{module}.{code.co_qualname}"
            run_counts = run_counts or name in AFTER_STEP
            is_outside = is_outside or name in OUTSIDE
            phase, part = phase or _phase_at(each, name, state, depth), part or RUN_PARTS.get(name, "")
        elif not where and _is_of_script(code.co_filename):
            where = f"{os.path.basename(code.co_filename)}:{each.f_lineno} ({code.co_name})"
        elif not where:
            if code.co_name not in _WRAPPERS:
                function = code.co_qualname
            # Autograd calls the hooks of DistributedDataParallel without a frame of Python.
            if module.startswith(_COLLECTIVES) or code.co_name == "_engine_run_backward":
                waits = IN_COLLECTIVE
    if not phase:
        phase = part or (IN_STEP if state.phase is RUNNING else IN_SCRIPT)
        if waits == AT_MEETING:
            phase = WAITS_FOR_RANKS
        if waits_for_device:
            phase = WAITS_FOR_DEVICE
    said = ", ".join(filter(None, (function, where)))
    return Place(phase, said, waits, run_counts and state.phase is RUNNING, is_outside)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _phase_at(frame: FrameType, name: str, state: LoopState, depth: int) -> str:
    """Return what a ``frame`` of torchhooks, in the function ``name``, says of the phase; ``""`` if it says nothing."""
    if name.startswith("torchhooks.checkpoints.saver."):
        return "in a restore" if "restore" in name else "in a save"
    if name == ITEMS:
        return f"{WAITS_FOR_DATA} at depth {depth}"
    if name in HOOK_METHODS and isinstance(state.context, SessionRunContext):
        return f"in {HOOK_METHODS[name]} of {type(state.context.caller.hook).__name__}"
    if name == HOOK_CALL:
        called = frame.f_locals
        return f"in {called['name']} of {type(called['slot'].hook).__name__}"
    return "in an evaluation" if name == EVALUATE else OUTSIDE.get(name, "")


def is_paused(frame: FrameType) -> bool:
    """Return whether a person has paused the thread with the innermost ``frame``: in a debugger, or at a prompt."""
    for called in _called(frame):
        # A script may read its data from a pipe on stdin. Only a terminal has a person.
        if called is builtins.input or (called is sys.stdin and _is_terminal(sys.stdin)):
            return True
    for each in _outwards(frame):
        file, module = each.f_code.co_filename, f"{each.f_globals.get('__name__')}."
        if is_own_file(file):
            return False  # the whole script may run in a debugger, or be typed at a prompt
        if module.startswith(_DEBUGGERS) or (module.startswith(_PROMPTS) and not _is_of_script(file)):
            return True
    return False


def _called(frame: FrameType) -> Iterator[object]:
    """Yield what ``frame`` is calling, after the modules and the object in which that was looked up.

    For ``sys.stdin.readline()``, that is ``sys`` and ``sys.stdin``. No code of the script is called for it.
    """
    instructions = _instructions(frame.f_code)
    here = next((each for each in reversed(instructions) if each.offset <= frame.f_lasti), None)
    if here is None or here.positions is None or here.positions.lineno is None or "CALL" not in here.opname:
        return  # also in a frame that has just begun
    # A call begins where the name of what is called does. Once it was made often, Python 3.11 makes it in its PRECALL.
    begins = here.positions.lineno, here.positions.col_offset
    found: object = None
    for each in instructions:
        if each.positions is None or (each.positions.lineno, each.positions.col_offset) != begins:
            continue
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            # Not a local variable of a function: reading f_locals would keep what they refer to until it returns.
            found = frame.f_globals.get(each.argval, frame.f_builtins.get(each.argval))
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            # Not an attribute of any object, which may be computed by code of the script.
            found = vars(found).get(each.argval) if isinstance(found, ModuleType) else None
        else:
            continue
        yield found


@lru_cache(64)  # a look a second
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [*dis.get_instructions(code)]


def _is_terminal(stream: object) -> bool:
    return isinstance(stream, TextIOWrapper) and not stream.closed and stream.isatty()


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
    letter = "" if process.pid is None else process_state(process.pid)
    problems = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for a disk"}
    others = {"R": "is alive and runs", "S": "is alive and sleeps"}
    return Child(f"{name} {(problems | others).get(letter, 'is alive')}", letter not in problems)


def _exit_code(process: BaseProcess) -> int | None:
    """Return how ``process`` has ended, as ``exitcode`` says it, without collecting it; ``None`` if it has not."""
    if process.pid is not None and hasattr(os, "waitid"):
        with suppress(ChildProcessError):  # it is a child of multiprocessing's server, or was collected
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return process.exitcode

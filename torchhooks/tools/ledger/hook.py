"""A hook that writes digests of what each run was given, what it returned and what it changed."""

from __future__ import annotations

import ctypes
import math
import operator
import os
import platform
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from torchhooks.common.checks import folder
from torchhooks.common.digests import BegunDigest, KnownSums
from torchhooks.common.errors import brief
from torchhooks.common.log import logger
from torchhooks.common.stateful import Stateful
from torchhooks.common.text import did_you_mean, installed_version, kind_of, shown
from torchhooks.common.timers import GivenTimer
from torchhooks.common.trees import as_snapshot
from torchhooks.fetches.names import Value, bare_optimizer, named_outputs, parameters_of
from torchhooks.lifecycle.coordinator import Coordinator
from torchhooks.lifecycle.hook import PeriodicHook, SessionRunArgs, SessionRunContext
from torchhooks.lifecycle.session import Session
from torchhooks.tools.ledger.comparing import Difference, compare_entries, differing_environment
from torchhooks.tools.ledger.lines import FORMAT, NO_GRADIENT, QUANTITIES, Entry, LedgerFile
from torchhooks.tools.ledger.parts import is_readable, state_of

_NO_ITEM: Any = type("NoItem", (), {})()
_PARTS = (torch.nn.Module, torch.optim.Optimizer)  # not read as arguments of the step: see "parameters"
_MT19937_BYTES = 2500  # of NumPy's generator: 624 words and the place of the next one

_DEFAULT = ("inputs", "random", "outputs")
_SMALL_BYTES = 4 << 20  # of parameters that are digested unless the hook was told what to digest
_FEW_TENSORS = 32  # on a device, where a digest takes a dozen launches

WHAT = ("inputs", "random", "outputs", "gradients", "parameters", "optimizers", "state")
"""What a LedgerHook can be asked for."""


class LedgerHook(PeriodicHook):
    """Writes a line with digests for each run, to find out where two training runs part.

    >>> hooks = [LedgerHook("run", what=["inputs", "outputs", "parameters"])]
    >>> with MonitoredLoop(step, model, optimizer, hooks=hooks) as loop:
    ...     for inputs in loop.until_stop(batches):
    ...         loss = loop.run(inputs)

    A process that resumes the training run compares each run that it makes again with the line of the process before
    it. The log then says ``made again with the same bits: item, arguments, random states, outputs (37 runs)`` and what
    was not compared, or names the first run that is not what it was, what differs, and what that may come from.
    ``python -m torchhooks diff A B`` compares two folders. :doc:`Prove that your script resumes </proof>` shows how to
    read both.

    Args:
        output_dir: the folder of the training run; the lines are in ``ledger/rank-0.jsonl`` of it, one file a rank. By
            default, the ``checkpoint_dir`` of the loop.
        every_n_steps, timer: when to write a line, by default for each run; see
            :doc:`Choose a period </built-in-hooks>`.
        what: by default inputs, random states and outputs, and the parameters of a small model: of at most 4 MB, and on
            a device of at most 32 tensors. ``"inputs"`` is the item of ``until_stop`` and the arguments of the step,
            ``"random"`` the states of the random generators before the step, ``"outputs"`` what the step returned,
            ``"gradients"`` the gradients of each step of the optimizer, ``"parameters"`` the parameters and buffers of
            the model, ``"optimizers"`` the states and rates of the optimizers, ``"state"`` each other part of the
            loop's ``state``.

    Raises:
        ValueError: ``what`` has another name, or a period is not valid; from the loop, neither the hook nor the loop
            has a folder.
        TypeError: ``output_dir`` is not a path.

    Tensors on a device are digested there, and their digests arrive a few runs later: the host does not wait.
    """

    needs_step = False  # a run that counts no step has a line too

    # Of the class and not of the hook: the loops of a process, such as one for each fold, may write to one file, and
    # their numbers tell their runs apart.
    _loops: ClassVar[dict[str, list[str | None]]] = {}  # by the path of a file, the checkpoint_dir of each loop

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        every_n_steps: int | None = None,
        *,
        what: Iterable[str] | None = None,
        timer: GivenTimer | None = None,
    ) -> None:
        super().__init__(1 if every_n_steps is None and timer is None else every_n_steps, timer=timer)
        # No rank waits for another one: each writes what it has, when its own timer says so.
        self.collective = False
        self._output_dir = None if output_dir is None else folder(output_dir, "output_dir")
        self._is_default = what is None
        names = [what] if isinstance(what, str) else [*(_DEFAULT if what is None else what)]
        for name in names:
            if name not in WHAT:
                raise ValueError(f"what={shown(what)}: {name!r} is none of {list(WHAT)}{did_you_mean(name, [*WHAT])}")
        self._what = {name for name in WHAT if name in names}
        self._handles: list[RemovableHandle] = []
        self._file: LedgerFile | None = None

    def begin(self) -> None:
        super().begin()
        self._file = None
        self._names: dict[str, list[str]] = {}
        self._line: _Line | None = None
        self._earlier: dict[int, Entry] = {}
        self._same = 0
        self._compared: set[str] = set()  # the quantities that every run that was made again has in both lines
        self._left_out: set[str] = set()  # the quantities without a digest

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        super().after_create_session(session, coord)
        self._session = session
        if self._is_default and session.model is not None and _is_small(session.model):
            self._what.add("parameters")
        # A recovery creates a session too, and goes on in the open file without a new header. A reader sees by the
        # numbers of the runs that they went back.
        if self._file is None:
            self._open(session)
        self._watch_optimizers(session)
        self._random = _RandomStates(session.device)
        self._random_at_start = self._random.digests()
        self._drawn: set[str] = set()
        # What an earlier process, or this one before a recovery, wrote of the runs that are made again now.
        self._earlier, old = {}, 0
        if session.was_restored:
            self._earlier, old = self._opened.after(session.total_runs, self._loop, self._process)
        if old and self.writes:
            logger.info(
                "the ledger has lines of an older format of %s that are made again: nothing is compared with them",
                _runs(old),
            )
        self._same, self._compared = 0, set(QUANTITIES)

    @property
    def _opened(self) -> LedgerFile:
        assert self._file is not None  # after_create_session opens it
        return self._file

    def _open(self, session: Session) -> None:
        place = self._output_dir if self._output_dir is not None else session.checkpoint_dir
        if place is None:
            raise ValueError(f"{self!r}: the loop has no checkpoint_dir: give LedgerHook(output_dir) a folder")
        rank = session.ranks.rank
        self._file = file = LedgerFile(os.fspath(place), rank)
        self._process = file.last_process() + 1
        # A loop that resumes a folder in the same process, as in a test or a notebook, is the same loop going on.
        loops = self._loops.setdefault(os.path.abspath(file.path), [])
        if session.checkpoint_dir is None or session.checkpoint_dir not in loops:
            loops.append(session.checkpoint_dir)
            self._loop = len(loops)
        else:
            self._loop = loops.index(session.checkpoint_dir) + 1
        file.append(
            {
                "ledger": FORMAT,
                "process": self._process,
                "loop": self._loop,
                "resumed_at": session.total_runs,
                "rank": rank,
                "world_size": session.ranks.size,
                **environment(session.device),
            }
        )

    # -- before the step ----------------------------------------------------------------------------------------------

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        session = self._session
        position = session.position
        if position.is_repeating:
            # The script repeats the run on its way to the loop of the checkpoint, where it is undone.
            self.trigger.withdraw()
        if not self.trigger.due:
            self._line = None
            return None
        self._line = line = _Line(self._leave_out)
        if "inputs" in self._what and not run_context.ends_epoch:
            # The step may change both in place, so they are read before it.
            item = position.current_item if position.depth else _NO_ITEM
            line.add_inputs(item, *run_context.call_arguments)
        if "random" in self._what:
            states = line.digests["random"] = self._random.digests()
            self._drawn |= {name for name, state in states.items() if state != self._random_at_start.get(name)}
        self._place = session.epoch, session.batch
        return super().before_run(run_context)

    def _watch_optimizers(self, session: Session) -> None:
        # A recovery comes here again, and must not register the hooks a second time.
        self._stop_watching()
        if "gradients" not in self._what:
            return
        names = {id(each): name for name, each in _named_parameters(session)}
        watched: list[torch.Tensor] = []
        for name, optimizer in _optimizers(session).items():
            start = len(watched)
            own = parameters_of(optimizer)
            watched += own
            for number, parameter in enumerate(own):
                names.setdefault(id(parameter), f"{name}[{number}]")
            self._handles.append(optimizer.register_step_pre_hook(partial(self._before_step, start)))
            self._handles.append(optimizer.register_step_post_hook(partial(self._after_step, start)))
        self._gradient_names = [names[id(parameter)] for parameter in watched]

    def _before_step(self, start: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called when ``optimizer`` makes a step: gradients that it does not use are no state."""
        if _closure(optimizer, args, kwargs) is None:
            self._note_gradients(start, optimizer)

    def _after_step(self, start: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called after a step: a closure computes the gradients in it, and drops those of the run before."""
        if _closure(optimizer, args, kwargs) is not None:
            self._note_gradients(start, optimizer)

    def _note_gradients(self, start: int, optimizer: torch.optim.Optimizer) -> None:
        if self._line is None:
            return  # outside of a run, or in one that is not due
        # The script may have added a group since the session began. Its parameters have no name, so they are left out.
        for place, parameter in enumerate(parameters_of(optimizer), start):
            if parameter.grad is not None and place < len(self._gradient_names):
                self._line.gradients[place] = self._line.begin("gradients", parameter.grad)

    # -- after the step -----------------------------------------------------------------------------------------------

    def run_due(self, run_context: SessionRunContext, values: Value) -> None:
        # From here on there is no line, so that a step that the script makes between two runs is not added to this one.
        session, line, self._line = self._session, self._line, None
        assert line is not None  # before_run made it
        line.forget_known()  # the step may have changed them in place
        if "outputs" in self._what and not run_context.ends_epoch:
            line.add("outputs", session.outputs)
            line.values = dict(_numbers(session.outputs))
        if "gradients" in self._what:
            line.add_each("gradients", [line.gradients.get(place) for place in range(len(self._gradient_names))])
            self._name("gradients", self._gradient_names)
        if "parameters" in self._what and session.model is not None:
            tensors = {key: each for key, each in session.model.state_dict().items() if isinstance(each, torch.Tensor)}
            line.add_each("parameters", [line.begin("parameters", each) for each in tensors.values()])
            self._name("parameters", [*tensors])
        if "optimizers" in self._what:
            line.add_named("optimizers", {name: state_of(each) for name, each in _optimizers(session).items()})
        if "state" in self._what:
            others = {name: part for name, part in session.state.items() if _has_plain_state(part)}
            line.add_named("state", {name: state_of(part) for name, part in others.items()})
        epoch, batch = self._place
        # All numbers are read now. On a device, _write() is called some runs later, when the session has moved on.
        entry = Entry(self._loop, session.total_runs, session.global_step, epoch, batch, self._process, format=FORMAT)
        entry.drawn = sorted(self._drawn)
        tensors_of_line = line.on_device()
        if tensors_of_line:
            run_context.when_ready(tensors_of_line, partial(self._write, entry, line))
        else:
            self._write(entry, line, ((), ()))

    def _name(self, quantity: str, names: list[str]) -> None:
        if self._names.get(quantity) != names:
            self._names[quantity] = names
            self._opened.append({"names": {quantity: names}})

    def _write(self, entry: Entry, line: _Line, arrived: tuple[Sequence[Any], Sequence[Any]]) -> None:
        entry.digests, entry.values = line.finish(*arrived)
        self._opened.append_entry(entry)
        earlier = self._earlier.pop(entry.run, None)
        if earlier is not None:
            self._compare_with_earlier(earlier, entry)

    def _compare_with_earlier(self, earlier: Entry, entry: Entry) -> None:
        difference = compare_entries(earlier, entry, self._session.ranks.rank, self._names)
        # What differs in later runs follows from the first difference. So nothing more is compared, and the log has one
        # warning.
        if difference is not None:
            self._earlier = {}
            self._warn(difference)
            return
        self._compared &= earlier.digests.keys() & entry.digests.keys()
        self._same += 1
        if not self._earlier:
            self._tell_of_same(self._same)

    def _warn(self, difference: Difference) -> None:
        entry = difference.other
        before, now = (self._opened.environment(each.process) for each in (difference.one, entry))
        difference = difference._replace(environment=differing_environment(before, now))
        where = f" ({entry.place})" if entry.place else ""
        logger.warning(
            "run %d%s is not what it was before the restart: %s. %s",
            *(entry.run, where, difference.line, difference.cause),
        )

    def _tell_of_same(self, runs: int) -> None:
        if self.writes and self._compared:
            compared = ", ".join(_TEXTS.get(name, name) for name in QUANTITIES if name in self._compared)
            missing = [_TEXTS.get(name, name) for name in self._quantities() if name not in self._compared]
            rest = f"; not compared: {', '.join(missing)}" if missing else ""
            logger.info("made again with the same bits: %s (%s)%s", compared, _runs(runs), rest)

    def _quantities(self) -> Iterable[str]:
        """Yield the quantities that the loop has, whether or not they are digested."""
        session = self._session
        has_optimizer = bool(_optimizers(session))
        has = {
            "item": session.position.depth > 0,
            "gradients": has_optimizer,
            "parameters": session.model is not None,
            "optimizers": has_optimizer,
            "state": any(map(_has_plain_state, session.state.values())),
        }
        yield from (name for name in QUANTITIES if has.get(name, True))

    def _leave_out(self, quantity: str, error: Exception) -> None:
        """Say once that a quantity has no digest."""
        if quantity not in self._left_out:
            self._left_out.add(quantity)
            logger.info("the ledger has no digest of a value in %s: %s", quantity, brief(error))

    def end(self, session: Session) -> None:
        if self._same and self._earlier:  # the loop ends before it has made all of them again
            self._tell_of_same(self._same)

    def teardown(self) -> None:
        self._stop_watching()
        if self._file is not None:
            self._file.close()

    def _stop_watching(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Line:
    """The digests of one run, while some of them are on their way from a device."""

    def __init__(self, leave_out: Callable[[str, Exception], None]) -> None:
        self._leave_out = leave_out
        self.digests: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.gradients: dict[int, BegunDigest | None] = {}
        """By the place of the parameter, from the step of its optimizer on."""
        self._begun: list[tuple[BegunDigest, Callable[[str], None]]] = []
        self._known: KnownSums = {}

    def add(self, quantity: str, value: object) -> None:
        """Add the digest of ``value``, unless it cannot be read."""
        begun = self.begin(quantity, value, self._known)
        if begun is not None:
            self._put(begun, partial(self.digests.__setitem__, quantity))

    def add_inputs(self, item: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Add the digests of ``item`` and of the arguments of the step, which are usually the parts of the item."""
        parts = tuple(each for each in args if not isinstance(each, _PARTS))
        arguments: object = parts[0] if len(parts) == 1 else parts
        if kwargs:
            arguments = parts, {name: each for name, each in kwargs.items() if not isinstance(each, _PARTS)}
        if item is not _NO_ITEM:
            if type(item) is list:
                item = tuple(item)  # as which the body passes it on
            self.add("item", item)
            # Most scripts pass on the parts of the item, and these are not read twice. By identity: to compare tensors
            # costs as much as to read them, and waits for their device.
            is_item = type(item) is tuple and len(item) == len(parts) and all(map(operator.is_, item, parts))
            if (is_item or arguments is item) and not kwargs and "item" in self.digests:
                self.digests["arguments"] = self.digests["item"]
                return
        self.add("arguments", arguments)

    def begin(self, quantity: str, value: object, known: KnownSums | None = None) -> BegunDigest | None:
        """Return the digest of ``value``, whose tensors may change after this; ``None`` if it cannot be read."""
        try:
            return BegunDigest(value, known)
        except Exception as error:  # an object of an odd kind must not end the training run
            self._leave_out(quantity, error)
            return None

    def forget_known(self) -> None:
        self._known = {}

    def add_named(self, quantity: str, values: Mapping[str, object]) -> None:
        """Add a digest for each of ``values``, by name."""
        named = self.digests[quantity] = {}
        for name, value in values.items():
            begun = self.begin(quantity, value)
            if begun is not None:
                self._put(begun, partial(named.__setitem__, name))

    def add_each(self, quantity: str, begun: Sequence[BegunDigest | None]) -> None:
        """Add the digests of tensors, whose names stand in a line of their own."""
        each = self.digests[quantity] = [NO_GRADIENT] * len(begun)
        for place, one in enumerate(begun):
            if one is not None:
                self._put(one, partial(each.__setitem__, place))

    def _put(self, begun: BegunDigest, put: Callable[[str], None]) -> None:
        if begun.sums:
            self._begun.append((begun, put))
        else:
            put(begun.finish(()))

    def on_device(self) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """Return the sums and the numbers that have to be read back; ``None`` if all is on the host."""
        sums = [as_snapshot(each) for begun, _ in self._begun for each in begun.sums]
        numbers = [value for value in self.values.values() if isinstance(value, torch.Tensor) and not value.is_cpu]
        return (sums, numbers) if sums or numbers else None

    def finish(self, sums: Sequence[Any], numbers: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the digests and the numbers, given the values of :meth:`on_device`."""
        arrived, numbers_arrived = iter(sums), iter(numbers)
        for begun, put in self._begun:
            put(begun.finish([int(next(arrived)) for _ in begun.sums]))
        texts = {name: "".join(each) if isinstance(each, list) else each for name, each in self.digests.items()}
        values = {}
        for name, value in self.values.items():
            is_remote = isinstance(value, torch.Tensor) and not value.is_cpu
            values[name] = _as_json(next(numbers_arrived) if is_remote else value)
        return texts, values


_TEXTS = {"random": "random states"}


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _is_small(model: torch.nn.Module) -> bool:
    """Return whether digests of the parameters and buffers of ``model`` cost little in each run."""
    tensors = [*model.parameters(), *model.buffers()]
    # A lazy parameter has no size before the first run: its numel() raises.
    if any(torch.nn.parameter.is_lazy(each) for each in tensors):
        return False
    is_small = sum(each.numel() * each.element_size() for each in tensors) <= _SMALL_BYTES
    return is_small and sum(not each.is_cpu for each in tensors) <= _FEW_TENSORS


def _numbers(outputs: object) -> Iterable[tuple[str, object]]:
    """Yield the numbers among what a step returned, by the names under which hooks fetch them."""
    for name, value in named_outputs(outputs).items():
        if isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and value.numel() == 1 and not value.is_complex():
                yield str(name), value.detach()
        elif isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, np.complexfloating)):
            yield str(name), value


def _as_json(value: Any) -> float | str:
    try:
        number = float(value)
    except (OverflowError, RuntimeError):  # an integer beyond 1.8e308, or a tensor of a layout without it
        return kind_of(value)
    # JSON has no NaN and no infinity, and comparing.py reads these texts as numbers again.
    return number if math.isfinite(number) else str(number)


def _closure(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Return the function that computes the loss again, of the arguments of ``Optimizer.step``."""
    return next((each for each in args if each is not optimizer), kwargs.get("closure"))


def _optimizers(session: Session) -> dict[str, torch.optim.Optimizer]:
    parts = {"optimizer": session.optimizer, **session.state}
    bare = {name: bare_optimizer(part) for name, part in parts.items()}
    return {name: each for name, each in bare.items() if isinstance(each, torch.optim.Optimizer)}


def _named_parameters(session: Session) -> Iterable[tuple[str, torch.Tensor]]:
    if session.model is not None:
        yield from session.model.named_parameters()
    for name, part in session.state.items():
        if isinstance(part, torch.nn.Module):
            yield from ((f"{name}.{key}", each) for key, each in part.named_parameters())


def _has_plain_state(part: Stateful) -> bool:
    """Return whether the digest of ``part`` is one of its own: it is no optimizer."""
    return is_readable(part) and not isinstance(bare_optimizer(part), torch.optim.Optimizer)


# -- random states ----------------------------------------------------------------------------------------------------


class _RandomStates:
    """The states of the global random generators, and of the generator of ``device``. Reading them draws nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None
        if device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "get_rng_state"):
            self._module = torch.get_device_module(device)
        self._numpy_memory, self._numpy = self._find_numpy_memory(), ""
        self._numpy_sum = -1

    def digests(self) -> dict[str, str]:
        _, words, gauss = random.getstate()
        digests = {
            # The last word says how many of the others were used. All of them change together, so some tell of all.
            "python": f"{zlib.crc32(repr((words[-1], words[:8], gauss)).encode()):08x}",
            "numpy": self._numpy_digest(),
            "torch": f"{zlib.crc32(torch.get_rng_state().numpy().data):08x}",
        }
        if self._module is not None:
            digests[self._device.type] = f"{zlib.crc32(self._module.get_rng_state(self._device).numpy().data):08x}"
        return digests

    def _find_numpy_memory(self) -> Any:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # of NumPy 1.24 and later
        # Only of this generator, the default, is it known where its state is in memory. Any other one is asked each
        # time.
        if not isinstance(generator, np.random.MT19937):
            return None
        address: int = generator.ctypes.state_address
        return (ctypes.c_char * _MT19937_BYTES).from_address(address)

    def _numpy_digest(self) -> str:
        # NumPy takes 30 us to tell its state. Few scripts draw from it in each run, and its memory shows that.
        memory = -1 if self._numpy_memory is None else zlib.crc32(self._numpy_memory)
        if memory == -1 or memory != self._numpy_sum:
            state: Any = np.random.get_state(legacy=False)
            inner = state["state"]
            rest = (state["has_gauss"], state["gauss"], {name: each for name, each in inner.items() if name != "key"})
            self._numpy = f"{zlib.crc32(repr(rest).encode(), zlib.crc32(inner.get('key', b''))):08x}"
            self._numpy_sum = memory
        return self._numpy


# -- the environment --------------------------------------------------------------------------------------------------


def environment(device: torch.device) -> dict[str, object]:
    """Return what may explain a difference between two processes."""
    commit = _git("rev-parse", "HEAD")
    return {
        "torchhooks": installed_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "device": torch.get_device_module(device).get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "argv": sys.argv,
        "commit": commit,
        "dirty": None if commit is None else bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str | None:
    """Return what git prints about the script's repository; ``None`` if there is none, or no git."""
    place = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv and sys.argv[0] else os.getcwd()
    if not os.path.isdir(place):
        return None
    try:
        # The loop is waiting: a git that does not answer must not keep it from beginning.
        done = subprocess.run(["git", *arguments], cwd=place, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

"""Every operator of torch in a run, and what it makes of values that are not finite.

A value that is not finite has an :class:`Origin`: the operator that made it out of finite ones, or the tensor that was
there before. Each tensor that is not finite is followed by its memory, as long as that exists. So a value that an
operator replaces again, as ``nan_to_num`` does, leads nowhere, and what the loss has in the end has one origin.

Watching changes no bits: operators are called as they are, and what they return is looked at. It waits for the device
at each of them.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchhooks.tools.autopsy.figures import MOST_FIGURES, Figures, has_numbers, is_finite, kind_of, part_of, tensors_in

_OURS = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
# What they return may not have arrived yet, or was there before.
_NOT_LOOKED_AT = ("c10d", "_c10d_functional", "fsdp", "profiler", "prim")
# Their memory has any values until another operator writes to it.
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
# They write, and do not read what was there.
_REPLACING = ("fill_", "zero_", "copy_", "set_", "normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_")
# torch's private count of autograd nodes, of each thread; without it, no line of the forward pass is named.
_node_count: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
_ENGINE: CodeType = torch.autograd.graph._engine_run_backward.__code__  # noqa: SLF001 - it runs the backward pass
Values = tuple[Any, ...]
KeywordValues = dict[str, Any]
Call = tuple[Values, KeywordValues]


@dataclass(frozen=True)
class Source:
    """A line of the script."""

    file: str
    line: int
    text: str


@dataclass(eq=False)
class Origin:
    """Where a value that is not finite comes from."""

    number: int
    """How many origins were found before it."""
    run: int
    """The number of the run among those that were watched."""
    step: int
    """The global step of the run."""
    phase: str
    """``"data"``, ``"before"`` the run, ``"forward"``, ``"backward"``, ``"optimizer"``, or ``"after"`` the step."""
    kind: str
    """``"NaN"`` or ``"infinity"``."""
    operation: str | None = None
    """The operator, as ``"aten.div.Tensor"``; ``None`` of what was there before the run."""
    is_unwritten: bool = False
    """Whether the operator only reserved the memory, as ``torch.empty`` does, and no other one wrote to it."""
    module: str | None = None
    """The path of the module in whose ``forward`` the operator is; ``None`` outside of any."""
    source: Source | None = None
    """The line of the operator; in the backward pass, of the operator that is differentiated; of what was there before
    and has no name, of the operator that used it first."""
    node: str | None = None
    """In the backward pass, the node of the graph, as ``"DivBackward0"``."""
    tensor: str | None = None
    """The name of what the operator writes to, or of what was there before."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The numbers that are not finite among the arguments, such as a learning rate."""
    inputs: list[Figures] = field(default_factory=list)
    outputs: list[Figures] = field(default_factory=list)
    became_nan: Origin | None = None
    """The operator that made a NaN out of an infinity."""


Line = tuple[str, int]
"""A file of the script, and the number of a line in it."""


class _Place(NamedTuple):
    """Where an operator runs: in the forward of which module, and at which line."""

    module: str | None
    line: Line | None


class _Memories:
    """What is known of the memory of tensors, as long as the memory exists."""

    def __init__(self) -> None:
        # A weak reference keeps the number of the memory from being used again.
        self._known: dict[int, tuple[StorageWeakRef, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def __getitem__(self, tensor: torch.Tensor) -> Any:
        """Return what is known of the memory of ``tensor``, or ``None``."""
        return self._known.get(_memory(tensor), (None, None))[1]

    def __setitem__(self, tensor: torch.Tensor, value: object) -> None:
        self._known[_memory(tensor)] = StorageWeakRef(tensor.untyped_storage()), value

    def forget(self, tensor: torch.Tensor) -> None:
        self._known.pop(_memory(tensor), None)

    def prune(self) -> list[Any]:
        """Forget the memory that is gone, and return what is known of the rest."""
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        return [value for _, value in self._known.values()]


class Operations(TorchDispatchMode):
    """Looks at the results of all operators while it is entered.

    Args:
        path: returns the path of the module whose ``forward`` is running, or ``None``.
        is_made: returns whether the step is made, so that what runs is a fetch or another part of a hook.
    """

    # Without this, torch raises NotImplementedError at an operator of higher order, such as flex_attention.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a run that is watched, and to skip it costs as much as the looking

    def __init__(self, path: Callable[[], str | None], is_made: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path, self._is_made = path, is_made
        self._run = self._step = 0
        self._names: dict[int, str] = {}  # by the address of a tensor
        self._origins = _Memories()  # of tensors that are not finite
        self._unwritten = _Memories()  # the operator that reserved the memory, and its place
        self._data: list[Origin] = []  # of what the run got and is not finite
        # By the number of an autograd node: where the operator ran whose derivative the node is.
        self._places: dict[int, _Place] = {}
        self._counts: dict[int, int] = {}  # of nodes, by thread
        self._changed_view: tuple[torch.Tensor, _Place] | None = None
        self.found: list[Origin] = []
        self._read: list[Origin] = []  # of the numbers that the script read with item() and that were not finite
        self._harmless: set[tuple[str | None, Source | None]] = set()  # of those that it reads in other runs too
        self.is_paused = False
        """Whether operators are those of torchhooks, which are not looked at."""
        self.unreadable = 0
        """How many operators had results that could not be looked at."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not look at the operators inside this ``with`` block, which are those of torchhooks."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def stop(self) -> None:
        """Look at no operator any more."""
        self.is_paused = True

    def begin(
        self, run: int, step: int, named: Iterable[tuple[str, torch.Tensor]], inputs: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Begin the run number ``run``, that makes the global step ``step``.

        ``named`` are the tensors that stay from run to run, and ``inputs`` are of this run.
        """
        self._run, self._step = run, step
        self._names, self._places, self._data, self._read = {}, {}, [], []
        # By thread, because torch counts in each: autograd runs the backward pass of a GPU in another one.
        self._counts = {threading.get_ident(): _node_count()}
        self._origins.prune()
        self._unwritten.prune()
        bad = []
        for name, tensor in named:
            part = part_of(tensor)
            self._names.setdefault(part.data_ptr(), name)
            if has_numbers(part):
                if not is_finite(part):
                    bad.append((name, part, self._origins[part]))
                elif self._origins:  # the script may have written to it between two runs
                    self._origins.forget(part)
        earlier = _first((origin.kind, origin) for _, _, origin in bad if origin is not None)
        for name, part, known in bad:
            # What became so between two runs, such as an average of the model, became so by what was so already.
            self._origins[part] = known or earlier or self._was_there(name, part)
        for name, tensor in inputs:
            part = part_of(tensor)
            self._names.setdefault(part.data_ptr(), name)
            if has_numbers(part) and not is_finite(part):
                self._origins[part] = origin = self._was_there(name, part, "data")
                self._data.append(origin)

    def end(self, step: int) -> None:
        """Note that the run has made the global step ``step``."""
        for origin in self.found:
            for each in (origin, origin.became_nan):
                if each is not None and each.run == self._run:
                    each.step = step
        self._changed_view = None
        # A number that the script also reads in runs that are well does not explain the run that is not.
        self._harmless |= {(each.operation, each.source) for each in self._read}

    def read(self) -> Origin | None:
        """Return the origin of the first number that the script read and that was not finite, as others were before."""
        new = (each for each in self._read if (each.operation, each.source) not in self._harmless)
        return next(new, self._read[-1] if self._read else None)

    def runs_of_values(self) -> set[int]:
        """Return the numbers of the runs in which something became not finite that is still there."""
        return {origin.run for origin in self._origins.prune()}

    def origin_of(self, value: object) -> Origin | None:
        """Return the origin of what is not finite in ``value``, a tensor or a structure of them, ``None`` if all is."""
        found = []
        for tensor in map(part_of, tensors_in(value)):
            if has_numbers(tensor) and not is_finite(tensor):
                found.append((kind_of(tensor), self._origins[tensor] or self._was_there(None, tensor)))
        return _first(found)

    def first_alive(self) -> Origin | None:
        """Return the first origin of what is not finite now, as far as it was not replaced."""
        return _first((each.kind if each.became_nan is None else "NaN", each) for each in self._origins.prune())

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Values = (), kwargs: KeywordValues | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        self._attempt(self._note_nodes)
        result = func(*args, **kwargs)
        self._attempt(self._look, func, args, kwargs, result)
        return result

    def _attempt(self, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception:  # of a tensor of an odd kind: the training run is worth more than the report
            self.unreadable += 1

    # -- places -------------------------------------------------------------------------------------------------------

    def _note_nodes(self) -> None:
        """Note the place of the autograd nodes that were made since the operator before.

        Autograd makes the node before the operator runs. Only after an operator that writes to a view, a node of the
        whole tensor is made later.
        """
        count, thread = _node_count(), threading.get_ident()
        seen = self._counts.get(thread, count - 1)
        if count == seen:
            return
        if self._changed_view is not None:
            view, place = self._changed_view
            self._changed_view = None
            for tensor in (view, view._base):  # noqa: SLF001 - the public way to the whole tensor of a view
                if tensor is not None and tensor.grad_fn is not None:
                    self._places.setdefault(_number(tensor.grad_fn), place)
            count = _node_count()  # to ask for a node of a view may make it
        self._counts[thread] = count
        place = self._place(_node())
        for number in range(seen, count):
            self._places.setdefault(number, place)

    def _place(self, node: Node | None) -> _Place:
        """Return where the operator runs that is running, in ``node`` of the backward pass if there is one."""
        line = _line(node is not None)
        if node is None:
            return _Place(self._path(), line)
        forward = self._places.get(_number(node), _Place(None, None))
        if line is None:
            return forward
        return _Place(self._path() or forward.module, line)  # Python code in the node: a Function, or a recomputation

    # -- values -------------------------------------------------------------------------------------------------------

    def _look(self, func: OpOverload, args: Values, kwargs: KeywordValues, result: object) -> None:
        kind = _kind_of(func)
        if not kind.is_looked_at or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            for each in [] if kind.is_view else map(part_of, tensors_in(args)):  # another rank may write to it
                self._unwritten.forget(each)
            return  # waiting for the device would break the capture of a CUDA graph
        # What item() calls. The number leaves torch here, so no later operator shows what the step makes of it.
        if kind.name == "_local_scalar_dense":
            if has_numbers(number := part_of(args[0])) and not is_finite(number):
                self._read.append(self._origin_among([number], [], False) or self._was_there(None, number))
            return
        if kind.written:
            # Not what it returns: the operators of torch._foreach_add_() and the like, which optimizers call,
            # return nothing.
            written = [args[place] if place < len(args) else kwargs.get(name) for place, name in kind.written]
            results = [part_of(each) for each in tensors_in(written[0] if len(written) == 1 else written)]
            view = written[0]
            if torch.is_grad_enabled() and isinstance(view, torch.Tensor) and view._is_view():  # noqa: SLF001
                self._changed_view = view, self._place(_node())
        else:
            results = [part_of(each) for each in tensors_in(result)]
        bad = [each for each in results if has_numbers(each) and not is_finite(each)]
        if kind.is_empty:
            for each in results:
                self._origins.forget(each)
            for each in bad:
                self._unwritten[each] = str(func), self._place(_node())
            return
        # Nearly all operators end here: there was nothing to follow so far.
        if not bad and not (self._origins or self._unwritten):
            return
        given: list[torch.Tensor] = []
        if bad:
            given = [part_of(each) for each in tensors_in((args, kwargs))]
            if not kind.written:  # a view of what was given is what it was
                memory = {_memory(each) for each in given}
                bad = [each for each in bad if _memory(each) not in memory]
        cause = self._cause(func, (args, kwargs), given, results if kind.written else [], bad) if bad else None
        for changed in results if kind.written else bad:
            if any(changed is each for each in bad):
                self._origins[changed] = cause
            elif changed.numel() * changed.element_size() >= changed.untyped_storage().nbytes():
                self._origins.forget(changed)
            else:  # one row of a larger tensor
                continue
            self._unwritten.forget(changed)

    def _cause(
        self,
        func: OpOverload,
        call: Call,
        given: list[torch.Tensor],
        written: list[torch.Tensor],
        bad: list[torch.Tensor],
    ) -> Origin:
        """Return the origin of ``bad``, which the ``call`` of ``func`` has made of ``given``."""
        cause = self._origin_among(given, written, _kind_of(func).replaces)
        kind = "NaN" if any(kind_of(each) == "NaN" for each in bad) else "infinity"
        if cause is None:
            cause = self._made(func, call, given, written, bad, kind)
            self.found.append(cause)
        elif kind == "NaN" and cause.kind == "infinity" and cause.became_nan is None:
            cause.became_nan = self._made(func, call, given, written, bad, kind)
        return cause

    def _origin_among(self, given: list[torch.Tensor], written: list[torch.Tensor], replaces: bool) -> Origin | None:
        """Return the first origin of what is not finite in ``given``; of what was ``written``, as it was before."""
        changed = {_memory(each) for each in written}
        found: list[tuple[str, Origin]] = []
        for each in given:
            if not has_numbers(each) or (replaces and _memory(each) in changed):
                continue
            known = self._origins[each]
            unwritten = self._unwritten[each]
            if known is None and unwritten is not None and not is_finite(each):
                known = self._was_unwritten(each, *unwritten)
                self._origins[each] = known
            if _memory(each) in changed:
                found += [] if known is None else [(known.kind, known)]
            elif not is_finite(each):
                if known is None:
                    name = self._name(each)
                    # Of a tensor without a name, the line of the script says which one it is.
                    source = _source(_line(False)) if name is None else None
                    self._origins[each] = known = self._was_there(name, each, source=source)
                found.append((kind_of(each), known))
        return _first(found)

    def _name(self, tensor: torch.Tensor) -> str | None:
        return self._names.get(tensor.data_ptr()) or self._names.get(tensor.untyped_storage().data_ptr())

    def _was_there(
        self, name: str | None, tensor: torch.Tensor, phase: str = "before", source: Source | None = None
    ) -> Origin:
        """Return the origin of ``tensor``, which no operator of the run has made."""
        kind = kind_of(tensor)
        for origin in self._data:  # no operator makes a tensor of an array
            if origin.tensor == name or (name is None and origin.kind == kind):
                return origin
        return self._new(phase, kind, tensor=name, source=source, outputs=[Figures.of(tensor)])

    def _was_unwritten(self, tensor: torch.Tensor, operation: str, place: _Place) -> Origin:
        """Return the origin of ``tensor``, whose memory ``operation`` has reserved at ``place``."""
        return self._new(
            self._phase(_node()),
            kind_of(tensor),
            operation=operation,
            is_unwritten=True,
            module=place.module,
            source=_source(place.line),
            tensor=self._name(tensor),
            outputs=[Figures.of(tensor)],
        )

    def _new(self, phase: str, kind: str, **known: Any) -> Origin:
        origin = Origin(len(self.found), self._run, self._step, phase, kind, **known)
        self.found.append(origin)
        return origin

    def _made(
        self,
        func: OpOverload,
        call: Call,
        given: list[torch.Tensor],
        written: list[torch.Tensor],
        bad: list[torch.Tensor],
        kind: str,
    ) -> Origin:
        node = _node()
        place, names = self._place(node), [self._name(each) for each in bad]
        if node is not None and place.line is None and (variable := getattr(node, "variable", None)) is not None:
            # It adds gradients.
            place, names = _Place(None, _line(False)), [f"the gradient of {self._name(part_of(variable))}"]
        changed = {_memory(each) for each in written}
        return Origin(
            len(self.found),
            self._run,
            self._step,
            self._phase(node),
            kind,
            operation=str(func),
            module=place.module,
            source=_source(place.line),
            node=None if node is None else node.name(),
            tensor=next(filter(None, names), None),
            numbers=_odd_numbers(func, call),
            inputs=[Figures.of(each) for each in given if _memory(each) not in changed][:MOST_FIGURES],
            outputs=[Figures.of(each) for each in bad[:MOST_FIGURES]],
        )

    def _phase(self, node: Node | None) -> str:
        if _is_in_optimizer():
            return "optimizer"
        if node is not None:
            return "backward"
        return "after" if self._is_made() else "forward"


class _Kind(NamedTuple):
    """What is known of an operator."""

    name: str
    is_looked_at: bool
    is_view: bool
    is_empty: bool
    written: tuple[tuple[int, str], ...]
    """The places and the names of the arguments that it writes to."""
    replaces: bool
    """Whether it does not read what it writes to."""


@functools.cache
def _kind_of(func: OpOverload) -> _Kind:
    if not isinstance(func, OpOverload):  # an operator of higher order, such as flex_attention
        return _Kind(str(func), True, False, False, (), False)
    schema, name = func._schema, func._opname  # noqa: SLF001
    arguments = enumerate(schema.arguments)
    written = [(place, each) for place, each in arguments if each.alias_info is not None and each.alias_info.is_write]
    is_view = not written and any(each.alias_info is not None for each in schema.returns)  # it is what it was
    return _Kind(
        name,
        func.namespace not in _NOT_LOOKED_AT and not is_view,
        is_view,
        name in _EMPTY,
        tuple((place, each.name) for place, each in written),
        name in _REPLACING or any(each.kwarg_only for _, each in written),  # as out=
    )


def _odd_numbers(func: OpOverload, call: Call) -> dict[str, float]:
    """Return the numbers that are not finite in the ``call`` of ``func``, by the name of the argument."""
    names = [each.name for each in func._schema.arguments] if isinstance(func, OpOverload) else []  # noqa: SLF001
    named = {**dict(zip(names, call[0], strict=False)), **call[1]}
    return {key: value for key, value in named.items() if isinstance(value, float) and not math.isfinite(value)}


def _first(found: Iterable[tuple[str, Origin]]) -> Origin | None:
    """Return the first origin in ``found`` of a NaN, or else of an infinity; each has the kind of what it led to.

    What meets a NaN is not its cause, however early it was there: the infinities of a mask, above all.
    """
    return min(found, key=lambda each: (each[0] != "NaN", each[1].number), default=("", None))[1]


def _memory(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - an address is used again when the memory is gone
    return number


def _node() -> Node | None:
    """Return the node of the backward pass that is running."""
    return torch._C._current_autograd_node()  # noqa: SLF001


def _number(node: Node) -> int:
    return node._sequence_nr()  # noqa: SLF001 - torch's only way to it


@functools.cache
def _is_theirs(file: str) -> bool:
    """Return whether the code in ``file`` is of the script, or of a library other than torch and torchhooks."""
    # Code that was typed, or made by exec(), is in <stdin> or <string>, and has no line to show.
    return file[:1] != "<" and not os.path.abspath(file).startswith(_OURS)


def _source(line: Line | None) -> Source | None:
    return None if line is None else Source(*line, linecache.getline(*line).strip())


def _line(is_in_node: bool) -> Line | None:
    """Return the file and the line of the script, or of a library other than torch, that is running.

    ``is_in_node`` asks for the code that runs in the node of the backward pass, not the code that began the pass.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way
    while frame is not None:
        code = frame.f_code
        if _is_theirs(code.co_filename):
            return code.co_filename, frame.f_lineno
        # Further out is only the line that called backward(), which is the same for all nodes.
        if is_in_node and code is _ENGINE:
            return None
        frame = frame.f_back
    return None


def _is_in_optimizer() -> bool:
    """Return whether the code that is running is that of an optimizer, torch's own or another one."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way
    while frame is not None:
        # By the class, and not by the file: the optimizer may be one of the script.
        if isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True
        if _is_theirs(frame.f_code.co_filename):  # a closure that an optimizer calls is no part of it
            return False
        frame = frame.f_back
    return False

"""Every operator of torch in a run, and what it makes of values that are not finite.

A value that is not finite has an :class:`Origin`: the operator that made it out of finite ones, or the tensor that was
there before. Each tensor that is not finite is followed by its memory, so a value that an operator replaces again, as
``nan_to_num`` does, leads nowhere, and what the loss has in the end has one origin.

Watching changes no bits: operators are called as they are, and what they return is looked at. It waits for the device
at each of them.
"""

from __future__ import annotations

import bisect
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchhooks.autopsy.figures import Figures, has_numbers, is_finite, kind_of, part_of, tensors_in

_OURS = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
# What they return may not have arrived yet, or was there before.
_NOT_LOOKED_AT = ("c10d", "_c10d_functional", "fsdp", "profiler", "prim")
# Their memory has any values until another operator writes to it.
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
_sequence_number: Any = getattr(torch.autograd, "_get_sequence_nr", None)


@dataclass(eq=False)
class Origin:
    """Where a value that is not finite comes from."""

    number: int
    """How many origins were found before it."""
    step: int
    """The global step that the run makes."""
    phase: str
    """``"before"`` the run, ``"forward"``, ``"backward"``, ``"optimizer"``, or ``"after"`` the step."""
    kind: str
    """``"NaN"`` or ``"infinity"``."""
    operation: str | None = None
    """The operator, as ``"aten.div.Tensor"``; ``None`` of what was there before the run."""
    module: str | None = None
    """The path of the module in whose ``forward`` the operator is; ``None`` outside of any."""
    source: tuple[str, int] | None = None
    """The file and the line of the script: in the backward pass, of the operator that is differentiated; of what was
    there before and has no name, of the operator that used it first."""
    node: str | None = None
    """In the backward pass, the node of the graph, as ``"DivBackward0"``."""
    tensor: str | None = None
    """The name of what the operator writes to, or of what was there before."""
    inputs: list[Figures] = field(default_factory=list)
    outputs: list[Figures] = field(default_factory=list)
    became_nan: Origin | None = None
    """The operator that made a NaN out of an infinity."""

    def to_save(self) -> dict[str, Any]:
        """Return the origin as plain data."""
        found = {
            name: getattr(self, name) for name in ("step", "phase", "kind", "operation", "module", "node", "tensor")
        }
        if self.source is not None:
            file, line = self.source
            text = linecache.getline(file, line).strip()
            found["source"] = {"file": file, "line": line, "text": text}
        found["inputs"] = [each.to_save() for each in self.inputs]
        found["outputs"] = [each.to_save() for each in self.outputs]
        if self.became_nan is not None:
            found["became_nan"] = self.became_nan.to_save()
        return {name: value for name, value in found.items() if value not in (None, [])}


class Operations(TorchDispatchMode):
    """Looks at the results of all operators while it is entered.

    Args:
        path: returns the path of the module whose ``forward`` is running, or ``None``.
        is_made: returns whether the step is made, so that what runs is a fetch of a hook.
    """

    def __init__(self, path: Callable[[], str | None], is_made: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path, self._is_made = path, is_made
        self._step = 0
        self._names: dict[int, str] = {}
        self._origins: dict[int, Origin] = {}  # by the memory of a tensor that is not finite
        self._empty: set[int] = set()
        self._forward: list[tuple[int, str | None, Any]] = []  # by the number of the node: the module, and the line
        self.count = 0
        """How many operators were looked at."""
        self.found: list[Origin] = []
        self.read: Origin | None = None
        """The origin of the last number that the script read with ``item()`` and that was not finite."""
        self.is_paused = False
        """Whether operators are those of torchhooks, which are not looked at."""
        self.unreadable = 0
        """How many operators had results that could not be looked at."""

    def begin(self, step: int, named: Iterable[tuple[str, Any]], inputs: Iterable[tuple[str, Any]]) -> None:
        """Begin the run that makes the global step ``step``.

        ``named`` are the tensors that stay from run to run, and ``inputs`` are of this run.
        """
        before, self._origins = self._origins, {}
        self._step, self._names, self._forward = step, {}, []
        self._empty.clear()
        self.read = None
        for names, origins in ((named, before), (inputs, {})):
            for name, tensor in names:
                part = part_of(tensor)
                self._names[_memory(part)] = name
                if has_numbers(part) and not is_finite(part):
                    self._origins[_memory(part)] = origins.get(_memory(part)) or self._was_there(name, part)

    def origin_of(self, value: Any) -> Origin | None:
        """Return the origin of what is not finite in ``value``, a tensor or a structure of them, ``None`` if all is."""
        found = []
        for tensor in map(part_of, tensors_in(value)):
            if has_numbers(tensor) and not is_finite(tensor):
                found.append((kind_of(tensor), self._origins.get(_memory(tensor)) or self._was_there(None, tensor)))
        return _first(found)

    def first_alive(self) -> Origin | None:
        """Return the first origin of what is not finite now, as far as it was not replaced."""
        return _first((each.kind if each.became_nan is None else "NaN", each) for each in self._origins.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        try:
            self._look(func, args, kwargs or {}, result)
        except Exception:  # of a tensor of an odd kind: the training run is worth more than the report
            self.unreadable += 1
        return result

    def _look(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        namespace, name = func.namespace, func._opname  # noqa: SLF001
        if namespace in _NOT_LOOKED_AT or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return  # waiting for the device would break the capture of a CUDA graph
        self.count += 1
        node = torch._C._current_autograd_node()  # noqa: SLF001
        if node is None and _sequence_number is not None and torch.is_grad_enabled():
            self._forward.append((_sequence_number() - 1, self._path(), _line()))
        given = [part_of(each) for each in tensors_in((args, kwargs))]
        if name == "_local_scalar_dense" and has_numbers(given[0]) and not is_finite(given[0]):
            self.read = self._origin_among(given, set()) or self._was_there(None, given[0])
            return
        written: set[int] = set()
        if func._schema.is_mutable:  # noqa: SLF001
            results = self._written(func, args, kwargs)
            written = {_memory(each) for each in results}
        else:
            results = [part_of(each) for each in tensors_in(result)]
            memory = {_memory(each) for each in given}
            results = [each for each in results if _memory(each) not in memory]  # a view is what it was
        if name in _EMPTY:
            for each in results:
                self._origins.pop(_memory(each), None)
                self._empty.add(_memory(each))
            return
        bad = [each for each in results if has_numbers(each) and not is_finite(each)]
        cause = self._cause(func, given, written, bad, node) if bad else None
        for each in results:
            memory_of_it = _memory(each)
            self._empty.discard(memory_of_it)
            if any(each is one for one in bad) and cause is not None:
                self._origins[memory_of_it] = cause
            elif (
                each.numel() * each.element_size() >= each.untyped_storage().nbytes()
            ):  # not one row of a larger tensor
                self._origins.pop(memory_of_it, None)

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Return the arguments that ``func`` changes in place."""
        changed: list[torch.Tensor] = []
        for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                changed += [part_of(each) for each in tensors_in(value)]
        return changed

    def _cause(
        self, func: Any, given: list[torch.Tensor], written: set[int], bad: list[torch.Tensor], node: Any
    ) -> Origin:
        """Return the origin of ``bad``, which ``func`` has made of ``given``."""
        cause = self._origin_among(given, written)
        kind = "NaN" if any(kind_of(each) == "NaN" for each in bad) else "infinity"
        if cause is None:
            cause = self._made(func, given, written, bad, node, kind)
            self.found.append(cause)
        elif kind == "NaN" and cause.kind == "infinity" and cause.became_nan is None:
            cause.became_nan = self._made(func, given, written, bad, node, kind)
        return cause

    def _origin_among(self, given: list[torch.Tensor], written: set[int]) -> Origin | None:
        """Return the first origin of what is not finite in ``given``; of what was ``written``, as it was before."""
        found: list[tuple[str, Origin]] = []
        for each in given:
            memory = _memory(each)
            if memory in self._empty or not has_numbers(each):
                continue
            known = self._origins.get(memory)
            if memory in written:
                found += [] if known is None else [(known.kind, known)]
            elif not is_finite(each):
                if known is None:
                    self._origins[memory] = known = self._was_there(self._names.get(memory), each)
                    known.source = _line()
                found.append((kind_of(each), known))
        return _first(found)

    def _was_there(self, name: str | None, tensor: torch.Tensor) -> Origin:
        origin = Origin(len(self.found), self._step, "before", kind_of(tensor), tensor=name, outputs=[Figures(tensor)])
        self.found.append(origin)
        return origin

    def _made(
        self, func: Any, given: list[torch.Tensor], written: set[int], bad: list[torch.Tensor], node: Any, kind: str
    ) -> Origin:
        origin = Origin(len(self.found), self._step, self._phase(node), kind, operation=str(func))
        if node is None:
            origin.module, origin.source = self._path(), _line()
        else:
            origin.node = node.name()
            origin.module, origin.source = self._forward_of(node)
        names = [self._names[_memory(each)] for each in bad if _memory(each) in self._names]
        origin.tensor = names[0] if names else None
        origin.inputs = [Figures(each) for each in given if _memory(each) not in written][:8]
        origin.outputs = [Figures(each) for each in bad][:8]
        return origin

    def _phase(self, node: Any) -> str:
        if node is not None:
            return "backward"
        if _is_in_optimizer():
            return "optimizer"
        return "after" if self._is_made() else "forward"

    def _forward_of(self, node: Any) -> tuple[str | None, Any]:
        """Return the module and the line whose operator ``node`` differentiates."""
        place = bisect.bisect_right(self._forward, node._sequence_nr(), key=lambda entry: entry[0])  # noqa: SLF001
        return self._forward[place - 1][1:] if place else (None, None)


def _first(found: Iterable[tuple[str, Origin]]) -> Origin | None:
    """Return the first origin in ``found`` of a NaN, or else of an infinity; each has the kind of what it led to.

    What meets a NaN is not its cause, however early it was there: the infinities of a mask, above all.
    """
    return min(found, key=lambda each: (each[0] != "NaN", each[1].number), default=("", None))[1]


def _memory(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common that share their memory."""
    return tensor.untyped_storage().data_ptr()


_theirs: dict[CodeType, bool] = {}


def _frames() -> Iterator[tuple[FrameType, bool]]:
    """Yield the frames that are running, the innermost first, and whether they are neither torch's nor torchhooks'."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way
    while frame is not None:
        code = frame.f_code
        if code not in _theirs:
            _theirs[code] = not os.path.abspath(code.co_filename).startswith(_OURS) and code.co_filename[:1] != "<"
        yield frame, _theirs[code]
        frame = frame.f_back


def _line() -> tuple[str, int] | None:
    """Return the file and the line of the script, or of a library other than torch, that is running."""
    return next(((frame.f_code.co_filename, frame.f_lineno) for frame, is_theirs in _frames() if is_theirs), None)


def _is_in_optimizer() -> bool:
    """Return whether the code that is running is that of an optimizer, torch's own or another one."""
    for frame, is_theirs in _frames():
        is_one = isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)
        if is_one or is_theirs:  # a closure that an optimizer calls is no part of it
            return is_one
    return False

"""Capturing what some code may change, and putting it back: the one mechanism for that.

It is used where code that torchhooks does not know changes more than it should:

* an evaluation: random states, gradients and training modes (:func:`torchhooks.lifecycle.evaluating.undisturbed`);
* a restore that fails in the middle: whatever it has loaded until then (:meth:`Saver.restore`, :func:`load_weights`);
* a resumed script, which repeats what the checkpoint contains on its way to the interrupted item: all states
  (:meth:`Position.load_state_dict`).

Each user captures what it needs, and what was captured last is put back first:

>>> weight = torch.nn.Parameter(torch.zeros(1))
>>> undo = Undo().random_states().gradients([weight])
>>> weight.grad = torch.rand(1)
>>> undo.put_back()
>>> print(weight.grad)
None

A module that :func:`loads_plainly` needs no copy for a restore: it is loaded last, and an interrupt waits until
that is done.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from torchhooks.common.errors import add_note, brief
from torchhooks.common.random_states import random_states, set_random_states
from torchhooks.common.stateful import Stateful
from torchhooks.common.trees import map_leaves
from torchhooks.position.variables import Variables
from torchhooks.ranks.dtensors import is_sharded

_Call = Callable[[], object]
_KNOWN = ("torch", "torchdata", "torchhooks")


class Undo:
    """What its methods have captured, to be put back."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, _Call]] = []

    def add(self, name: str, call: _Call) -> Undo:
        """Have ``call`` put back what a message calls ``name``. It returns true if that had changed."""
        self._calls.append((name, call))
        return self

    def put_back(self, error: BaseException | None = None, only: str | None = None) -> list[str]:
        """Put everything back, or what is called ``only``, and return the names of the states that had changed.

        Args:
            error: why. A note on it names what could not be put back.
            only: the name of what is put back.

        Raises:
            Exception: without ``error``, the first error that was raised meanwhile, once all the rest was put back.
            BaseException: an error that is not an ``Exception``, such as a Ctrl-C, likewise.
        """
        first, changed = error, []
        for name, call in reversed(self._calls):
            if only in (None, name):
                try:
                    changed += [name] if call() is True else []
                except BaseException as another:
                    if error is not None:
                        add_note(error, f"{name!r} may not be what it was before: {brief(another)}")
                    if first is None or (isinstance(first, Exception) and not isinstance(another, Exception)):
                        first = another
        if first is not None and first is not error:
            raise first
        return changed[::-1]

    def random_states(self) -> Undo:
        """Capture the random states of Python, NumPy and torch."""
        return self.add("random", partial(set_random_states, random_states()))

    def gradients(self, parameters: Iterable[torch.Tensor]) -> Undo:
        """Capture which tensors are the gradients of ``parameters``. What is added to one in place stays."""
        captured = [(parameter, parameter.grad) for parameter in parameters]

        def undo() -> None:
            for parameter, gradient in captured:
                if parameter.grad is not gradient:
                    parameter.grad = gradient

        return self.add("gradients", undo)

    def modes(self, modules: Iterable[torch.nn.Module]) -> Undo:
        """Capture which of ``modules`` and of the modules in them are in training mode."""
        captured = [(module, module.training) for each in modules for module in each.modules()]

        def undo() -> None:
            for module, training in captured:
                if module.training is not training:
                    module.train(training)  # not only the attribute: some modules merge or freeze weights in train()
            for module, training in captured:
                module.training = training  # train() of a module changes those inside of it

        return self.add("modes", undo)

    def loads(self, parts: Mapping[str, Any]) -> Undo:
        """Capture what ``load_state_dict()`` of ``parts`` changes.

        Tensors of modules are copied to the CPU, so that no memory of their device is needed. The state of an optimizer
        is not copied, because ``load_state_dict()`` replaces it. A part whose state cannot be copied only gets its
        attributes back.
        """
        for name, part in parts.items():
            for call in _undo_load(part):
                self.add(name, call)
        return self

    def states(self, parts: Mapping[str, Stateful], load: Callable[[str, Stateful, Any], bool]) -> Undo:
        """Capture the states of ``parts``, with the tensors copied to the CPU.

        A state that has changed is put back by ``load(name, part, state)``, which returns whether it did so.
        """

        def undo(name: str, part: Stateful, state: Any) -> bool:
            return not _same(state, part.state_dict()) and load(name, part, state)

        for name, part in parts.items():
            self.add(name, partial(undo, name, part, _on_host(part.state_dict())))
        return self


def finish(load: _Call, error: BaseException) -> None:
    """Call ``load()``, which loads modules that load plainly, again after ``error`` has interrupted it.

    Nothing but an interrupt, such as a Ctrl-C, is expected there. A copy of their values only for that would take a
    quarter of the time of a restore. So the restore is not taken back, but finished, which takes a moment.
    """
    if isinstance(error, Exception):
        add_note(error, "The modules may have been loaded in part")
    else:
        load()


def plain_modules(parts: Mapping[str, Any]) -> list[str]:
    """Return the names of the modules in ``parts`` that can be loaded last, so that no copy of them is needed.

    That is none if another part may look at what was loaded into them, as an optimizer does that keeps a copy of the
    weights in another dtype. Classes of torch and torchhooks do not.
    """
    modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    others = [part for name, part in parts.items() if name not in modules]
    if any(type(part).__module__.partition(".")[0] not in _KNOWN for part in others):
        return []
    return [name for name, module in modules.items() if loads_plainly(module)]


def loads_plainly(module: torch.nn.Module) -> bool:
    """Return whether ``load_state_dict()`` of ``module`` only copies into its tensors.

    Then it does not raise for a state that :func:`torchhooks.checkpoints.state.compare_module` has compared.
    """
    tensors = [*module.parameters(), *module.buffers()]
    return all(map(_loads_plainly, module.modules())) and all(map(_is_writable, tensors))


def _loads_plainly(module: Any) -> bool:
    if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:  # noqa: SLF001 - torch has no other way to ask
        return False
    names = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
    methods = [getattr(type(module), name) for name in names]
    return not any(name in vars(module) for name in names) and all(
        method.__module__.startswith("torch.") for method in methods
    )


def _is_writable(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference() and (tensor.layout is not torch.strided or 0 not in tensor.stride())


def _undo_load(part: Any) -> Iterable[_Call]:
    """Yield the calls that put the state of ``part`` back, the last one first."""
    while isinstance(part, torch.optim.Optimizer) and isinstance(vars(part).get("optimizer"), torch.optim.Optimizer):
        part = vars(part)["optimizer"]  # Accelerate's wrapper has no state of its own
    try:
        if isinstance(part, torch.nn.Module):
            yield _undo_module(part)
        elif isinstance(part, torch.optim.Optimizer):
            # What torch's load_state_dict() replaces as a whole, another one may change in place.
            yield _undo_items(part.state, *part.state.values(), *part.param_groups)
        # torchdata's loader starts its workers to tell its state. What Variables have is replaced, so putting their
        # attributes back is enough, and leaves the script the objects that it had.
        elif not isinstance(part, (Iterable, Variables)):
            yield partial(part.load_state_dict, copy.deepcopy(part.state_dict()))
    except Exception:  # the state cannot be read or copied, such as a hook's before its first session
        pass
    if not isinstance(part, torch.nn.Module) and hasattr(part, "__dict__"):
        yield _undo_items(vars(part))


def _undo_module(module: torch.nn.Module) -> _Call:
    state = {name: value for name, value in module.state_dict().items() if not torch.nn.parameter.is_lazy(value)}
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and not value.is_meta}
    copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors.values()]
    others = {name: copy.deepcopy(value) for name, value in state.items() if not isinstance(value, torch.Tensor)}

    def undo() -> None:
        with torch.no_grad():
            for tensor, values in copies:
                tensor.copy_(values)
        if others:
            module.load_state_dict(others, strict=False)

    return undo


def _undo_items(*dicts: dict[Any, Any]) -> _Call:
    captured = [(each, dict(each)) for each in dicts]

    def undo() -> None:
        for each, items in captured:
            each.clear()
            each.update(items)

    return undo


def _on_host(state: Any) -> Any:
    """Return a copy of ``state`` with its tensors on the CPU."""
    copied = map_leaves(_leaf_on_host, state)
    if hasattr(state, "_metadata"):
        copied._metadata = state._metadata  # noqa: SLF001 - where torch has the versions of the modules in their state
    return copied


def _leaf_on_host(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _same(before: Any, now: Any) -> bool:
    """Return whether ``now`` is the state of which ``before`` is the copy."""
    if isinstance(before, torch.Tensor):
        return isinstance(now, torch.Tensor) and _same_tensor(before, now.detach().cpu())
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return before.keys() == now.keys() and all(_same(value, now[key]) for key, value in before.items())
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(before) == len(now) and all(map(_same, before, now))
    # NaN differs from itself, and some objects cannot be compared.
    return type(before) is type(now) and repr(before) == repr(now)


def _same_tensor(before: Any, now: Any) -> bool:
    if is_sharded(before) and is_sharded(now):
        before, now = before.to_local(), now.to_local()
    try:
        return before.dtype == now.dtype and torch.equal(before, now)
    except RuntimeError:  # a layout that torch cannot compare
        return False

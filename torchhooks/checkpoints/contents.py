"""What a checkpoint contains: the state of a training run, which is all that a saver gets of a session.

A checkpoint is a dict with these entries:

* ``"model"`` and ``"optimizer"``, if the loop has them;
* each entry of the loop's ``state`` under its own name;
* each hook that has a state as ``"hooks.<name>"``;
* ``"global_step"``, and ``"runs"``: how many runs were made, which may be more;
* ``"classes"``: the names of the classes of optimizers and schedulers, by the name of their entry;
* ``"parameter_names"``: the names of the parameters in each group of an optimizer, by the name of its entry;
* ``"num_threads"``: ``torch.get_num_threads()``, on which the last bits of a sum depend;
* ``"metadata"``: the loop's ``metadata``, if there is any;
* ``"random"``: the random states of Python, NumPy and torch;
* ``"position"``: how far the loop's ``until_stop`` iterations are in their data (:mod:`torchhooks.data.position`);
* ``"gradients"``: the gradients that have accumulated on this rank, by the number of their parameter, and
  ``"sharded_gradients"``: the gradients that are DTensors;
* ``"running_values"``: what running fetches have accumulated since their last reports
  (:mod:`torchhooks.fetches.running`);
* ``"rank_tensors"``: the buffers of this rank that differ from the chief's;
* ``"sharded"``: the names of the parts whose tensors are in files of torch.distributed.checkpoint;
* ``"ranks"``: without DTensors, what belongs to each of the other ranks alone, from rank 1 on.

With several ranks, there are three kinds of part:

==========  ==================================================  ===================================================
kind        parts                                               written by
==========  ==================================================  ===================================================
replicated  modules, optimizers and other objects, of which     the chief, to ``state.pt``
            every rank has the same state; step, metadata
sharded     modules that have DTensors, the optimizers of       every rank its shards, to ``__<rank>_0.distcp``, with
            their parameters, gradients that are DTensors       torch.distributed.checkpoint (DCP)
per rank    hooks, loaders and samplers, objects with           every rank, to ``rank-<rank>.pt``, if the checkpoint
            ``per_rank``; random states, position, gradients,   has sharded parts; otherwise the chief for all, to the
            running values, buffers that differ                 entry ``"ranks"`` of ``state.pt``
==========  ==================================================  ===================================================

Checkpoints are always loaded with ``weights_only=True``, so that no file can run code. State that could not be loaded
this way is refused when it is saved, with its name. It may consist of tensors, numbers, strings, bytes, ``None``, and
torch's dtypes, devices, layouts and sizes, in dicts, lists, tuples and sets. NumPy numbers are saved as Python numbers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from torchhooks.checkpoints.sharded import sharded_parts, unreduced_gradients
from torchhooks.common.digests import has_plain_elements
from torchhooks.common.errors import CheckpointError
from torchhooks.common.stateful import PlainCopy, Stateful, has_state, type_of
from torchhooks.common.text import shortened, shown
from torchhooks.common.trees import Tree, changes_in_place
from torchhooks.fetches.names import bare_optimizer, parameters_of
from torchhooks.progress.training_state import TrainingState
from torchhooks.ranks.ranks import is_sharded, reshard

Entries = dict[str, Any]
"""The entries of a checkpoint, by name."""

Parts = Mapping[str, Stateful]
"""Objects whose states are entries of a checkpoint, by the name of the entry."""

HOOKS = "hooks."
OPTIONAL = "hooks.results of "  # restored where both have it: a hook that only reports can be added and left out
OWN_ENTRIES = (
    *("classes", "global_step", "gradients", "metadata", "num_threads", "parameter_names", "position", "random"),
    *("rank_tensors", "ranks", "running_values", "runs", "sharded", "sharded_gradients"),
)
"""The entries that are not the state of an object. Their names are reserved: no entry of a loop's ``state`` has one.

What a new one needs:

* to be described above, and written in ``saving``, if there is something to write, by the chief or by each rank: then
  its name is in ``ENTRIES_OF_EACH_RANK``, too;
* a part in ``saving.digest_of_state``, unless it is the same in two checkpoints with the same state;
* to be loaded in ``restoring.load``, with what an older checkpoint stands for that does not have it. If code of the
  script may change it, ``restoring.SecondLoad.load`` loads it too;
* a decision about recoveries. They set runs and steps back. The data go on, and so does what counts events.

If it is the loop that knows it, the owner is above this package: it joins the ``TrainingState`` by a method, as
``attach_peers`` does, before the first session is made, which shares what is there by then.
"""

ENTRIES_OF_EACH_RANK = ("gradients", "position", "random", "running_values")
RESERVED = ("model", "optimizer", *OWN_ENTRIES)


class StatefulHook(Stateful, Protocol):
    """A hook that has a state."""

    state_is_optional: bool
    """Whether a checkpoint can be restored that has no state of this hook, or has one without the hook."""


class Replicas:
    """At which saves the ranks compare their parameters.

    At the first one of a loop, and at each one after further runs until these have changed the parameters.
    """

    def __init__(self) -> None:
        self._first: object = None
        self._runs = -1  # at the last comparison
        self._is_over = False

    def are_due(self, runs: int) -> bool:
        """Return whether to compare them at a save after so many ``runs``."""
        return not self._is_over and runs != self._runs

    def are_the_same(self, parameters: object, runs: int) -> None:
        """Note that all ranks have the same ``parameters``, as a save describes them, after so many ``runs``."""
        if self._first is None:
            self._first = parameters
        self._is_over = self._first != parameters
        self._runs = runs


def parts_of(training: TrainingState) -> dict[str, Stateful]:
    """Return the objects whose state is saved, by name.

    Puts their parameters back into the shards of FSDP2, if the script has left whole ones in a module.

    Raises:
        CheckpointError: a name is reserved, or an object has no state.
    """
    parts: dict[str, Stateful] = {}
    if training.model is not None:
        parts["model"] = training.model
    if training.optimizer is not None:
        parts["optimizer"] = training.optimizer
    for name, part in training.state.items():
        if name in RESERVED or name.startswith(HOOKS):
            raise CheckpointError(f"state[{name!r}]: this name is reserved in checkpoints. Choose another one.")
        parts[name] = part
    for name, hook in training.hooks.items():
        parts[f"{OPTIONAL if hook.state_is_optional else HOOKS}{name}"] = hook
    for name, part in parts.items():
        if not has_state(part):
            raise CheckpointError(
                f"{name!r} is {type_of(part)}, without state_dict() and load_state_dict(): add them, or leave it out."
            )
        if isinstance(part, torch.nn.Module):
            reshard(part)
    return parts


def modules_of(training: TrainingState) -> list[torch.nn.Module]:
    """Return the model and the modules in the loop's state, such as an average of the weights."""
    return [each for each in (training.model, *training.state.values()) if isinstance(each, torch.nn.Module)]


def tensors_of(training: TrainingState) -> Iterator[torch.Tensor]:
    """Yield the tensors of the modules and optimizers that are saved, for their sizes. One may come several times.

    No object is asked for its state, which may take long, wait for a device or draw a random number.
    """
    gradients = {} if training.gradients is None else training.gradients.state_dict() or {}
    found: list[Iterable[object]] = [gradients.values()]
    for part in (training.model, training.optimizer, *training.state.values()):
        optimizer = bare_optimizer(part)
        if isinstance(part, torch.nn.Module):
            found += part.parameters(), part.buffers()
        elif isinstance(optimizer, torch.optim.Optimizer):
            found += (state.values() for state in optimizer.state.values() if isinstance(state, dict))
    for tensor in itertools.chain.from_iterable(found):
        if isinstance(tensor, torch.Tensor) and has_plain_elements(tensor):
            yield tensor


def gradients_to_reduce(training: TrainingState) -> list[tuple[object, str]]:
    """Return where FSDP2 keeps gradients of the optimizer that it has not reduced: objects and their attributes."""
    return [] if training.gradients is None else unreduced_gradients(modules_of(training))


def belongs_to_rank(name: str, part: object) -> bool:
    """Return whether each rank has a state of its own of the ``part`` called ``name``.

    A hook has, and so has anything that can be iterated, such as a loader or a sampler, but no module. All ranks
    have the same state of any other object, unless it has a true attribute ``per_rank``, and no DTensors.
    """
    if isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):
        return bool(getattr(part, "per_rank", False)) and not sharded_parts({name: part})
    if name in ("model", "optimizer"):
        return False
    return name.startswith(HOOKS) or bool(getattr(part, "per_rank", isinstance(part, Iterable)))


def parts_of_rank(parts: Parts) -> dict[str, Stateful]:
    """Return the objects in ``parts`` that have another state on each rank."""
    own = {name: part for name, part in parts.items() if belongs_to_rank(name, part)}
    modules = [part for part in own.values() if isinstance(part, torch.nn.Module)]
    parameters = {id(parameter) for module in modules for parameter in module.parameters()}
    # The optimizer of a module that each rank has alone has moments of these weights, so it belongs to the rank too.
    for name, part in parts.items() if parameters else ():
        if isinstance(part, torch.optim.Optimizer) and any(id(each) in parameters for each in parameters_of(part)):
            own[name] = part
    return own


def plain_metadata(metadata: Mapping[str, Tree] | None) -> dict[str, Tree]:
    """Copy ``metadata``, or raise a TypeError that lists what in it could not be loaded again."""
    if not isinstance(metadata, Mapping | None):
        raise TypeError(f"metadata={shown(metadata)}: must be a dict of plain data, such as vars(args)")
    plain = PlainCopy(lambda tensor: tensor.detach().to("cpu", copy=True))
    copied: dict[str, Tree] = plain(dict(metadata or {}), ("metadata",))
    if plain.problems:
        raise TypeError(
            f"{shortened(plain.problems, 8)}: metadata may contain numbers, strings, tensors and None, in dicts, "
            "lists, tuples and sets, such as dataclasses.asdict(config)"
        )
    return copied


# -- gradients that an optimizer has not used yet: what a checkpoint in the middle of an accumulation needs ------------

_SAMPLED = 2  # parameters at each end: to look at all of them after every step would cost as much as a small step


def register_step_post_hook(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Have ``hook`` called after each completed step of ``optimizer``, or of the optimizer that it wraps."""
    try:
        return optimizer.register_step_post_hook(hook)
    except AttributeError:
        # Accelerate's wrapper inherits the method, but has no hooks: it never calls torch's __init__.
        if not hasattr(optimizer, "optimizer"):
            raise
        return register_step_post_hook(optimizer.optimizer, hook)


class Gradients:
    """The gradients of an optimizer's parameters, as long as they accumulate.

    After ``optimizer.step()`` most scripts leave the used gradients in place until the next ``zero_grad()``. They are
    not worth saving. So each step is noted, and gradients count only if they changed since the last one.

    Args:
        optimizer: watched until :meth:`close`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps = 0
        """How many steps the optimizer has made."""
        self._optimizer = optimizer
        # Weak references: otherwise zero_grad() would not free the memory of these gradients until the next step.
        self._used: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._handle = register_step_post_hook(optimizer, self._note_step)

    def close(self) -> None:
        """Stop watching the optimizer."""
        self._handle.remove()

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the accumulated gradients by the number of their parameter; ``None`` if there are none."""
        if not self._accumulate():
            return None
        return {str(i): p.grad for i, p in enumerate(self.parameters()) if p.grad is not None}

    def load_state_dict(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Set the gradients that :meth:`state_dict` returned; for ``None``, drop what has accumulated."""
        if state is None and not self._accumulate():
            return  # used gradients stay where they are: a CUDA graph may write to their memory
        for i, parameter in enumerate(self.parameters()):
            grad = None if state is None else state.get(str(i))
            parameter.grad = None if grad is None else grad.to(parameter.device, copy=True)
        # No step has used the gradients that were loaded, so they count as accumulated, and the next save has them too.
        self._used = []

    def split(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return :meth:`state_dict` in two parts: the gradients that belong to this rank alone, and the DTensors."""
        gradients = self.state_dict() or {}
        shards = {number: gradient for number, gradient in gradients.items() if is_sharded(gradient)}
        return {number: gradient for number, gradient in gradients.items() if number not in shards}, shards

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the optimizer, in the order of their numbers."""
        return parameters_of(self._optimizer)

    def _sampled(self) -> list[torch.Tensor]:
        groups = self._optimizer.param_groups
        parameters = [*groups[0]["params"][:_SAMPLED], *groups[-1]["params"][-_SAMPLED:]]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _note_step(self, *_: object) -> None:
        self.steps += 1
        # Adding to a gradient in place changes its version; a new tensor is another one.
        self._used = [(weakref.ref(grad), changes_in_place(grad)) for grad in self._sampled()]

    def _accumulate(self) -> bool:
        used = [(reference(), version) for reference, version in self._used]
        return any(all(grad is not u or changes_in_place(grad) != v for u, v in used) for grad in self._sampled())

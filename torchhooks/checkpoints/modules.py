"""The states of modules: their names with and without wrappers, and the submodules that decide what they load."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from torchhooks.common.trees import Tree
from torchhooks.fetches.names import canonical

_HIDDEN = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")
"""The wrappers that take their own name out of a state, and put it back when one is loaded."""

# -- names -------------------------------------------------------------------------------------------------------------


def renamed(module: torch.nn.Module, state: dict[str, Tree]) -> dict[str, Tree]:
    """Return ``state`` with the names that ``module`` has, if they differ only by how the model is wrapped.

    Wrappers may be in any order, and around the model or a part of it.
    """
    like = module.state_dict()
    names = {name: name for name in state}
    if not all(name in state for name in like):
        own, paths = {_without_wrappers(name): name for name in like}, _paths_in_state(module)
        bare = {name: _without_wrappers(name) for name in state}
        # What the module does not have yet, such as a buffer that is None, is under the path of its submodule.
        names = {name: own.get(each) or _at_known_path(each, paths) for name, each in bare.items()}
        if len(own) < len(like) or len(set(names.values())) < len(names):
            return state
    elif _versions(state).keys() == _versions(like).keys():
        return state
    versions = {_without_wrappers(path): version for path, version in _versions(state).items()}
    found = {path: _without_wrappers(path) for path in _versions(like)}
    return _with_names(state, names, {path: versions[each] for path, each in found.items() if each in versions})


def bare_state(state: dict[str, Tree]) -> dict[str, Tree]:
    """Return ``state``, which a model has, with the names in the bare model."""
    names = {name: canonical(f".{name}")[1:] for name in state}
    prefix = ""
    # DistributedDataParallel has one submodule and no tensors. AveragedModel has its count of updates too.
    while names and all(name.startswith(f"{prefix}module.") for name in names.values()):
        prefix += "module."
    paths = {path: canonical(f".{path}")[1:] for path in _versions(state)}
    versions = {paths[path].removeprefix(prefix): version for path, version in _versions(state).items()}
    return _with_names(state, {name: each.removeprefix(prefix) for name, each in names.items()}, versions)


def _without_wrappers(name: str) -> str:
    # Also in the middle, where DistributedDataParallel wraps a part of the model. It may be the model's own name: then
    # two names may become the same.
    return ".".join(part for part in canonical(name).split(".") if part != "module")


def _paths_in_state(module: torch.nn.Module) -> dict[str, str]:
    """Return the path of each submodule as the names in a state begin with it, by its path without wrappers."""
    paths = [f"{path}." if path else "" for path, _ in module.named_modules(remove_duplicate=False)]
    return {_without_wrappers(path): _HIDDEN.sub("", path) for path in paths}  # of two, the wrapped module is the last


def _at_known_path(bare: str, paths: Mapping[str, str]) -> str:
    return next(paths[path] + bare[len(path) :] for path in _paths_to(bare) if path in paths)


def _versions(state: dict[str, Tree]) -> dict[str, Tree]:
    """Return the versions of the classes that ``state`` is of, by path with a period at the end; "" is the root.

    torch loads the state of another version in another way.
    """
    return {f"{path}." if path else "": version for path, version in getattr(state, "_metadata", {}).items()}


def _with_names(state: dict[str, Tree], names: Mapping[str, str], versions: Mapping[str, Tree]) -> dict[str, Tree]:
    new = type(state)()
    new.update({names[name]: value for name, value in state.items()})
    if hasattr(state, "_metadata"):
        vars(new)["_metadata"] = type(state)({path.removesuffix("."): each for path, each in versions.items()})
    return new


# -- what only torch can tell ------------------------------------------------------------------------------------------


class Deciding:
    """The submodules of ``module`` that decide for themselves what they load, so that only torch can tell.

    Such a submodule may give its buffers another shape, as observers of quantization do, and rename what is in the
    state of its submodules. torch compares what it leaves.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._paths: dict[str, bool] = {}
        for path, submodule in module.named_modules(remove_duplicate=False):
            bare = canonical(f"{path}.") if path else ""  # also that of the wrappers around a module
            self._paths[bare] = self._paths.get(bare, False) or _decides(submodule)
        self._is_any = any(self._paths.values())

    def on_names_at(self, name: str) -> bool:
        """Return whether one of them decides whether the tensor ``name`` has to be in the state."""
        return self._is_any and any(self._paths.get(path, False) for path in _paths_to(name))

    def on_values_at(self, name: str) -> bool:
        """Return whether the submodule that has the tensor ``name`` is one of them."""
        return self._is_any and next(self._paths[path] for path in _paths_to(name) if path in self._paths)


def _paths_to(name: str) -> Iterator[str]:
    """Yield the paths of the modules that may have ``name``, the innermost one first."""
    path = canonical(name)
    while path:
        path = path[: path.rstrip(".").rfind(".") + 1]
        yield path


def _decides(module: torch.nn.Module) -> bool:
    if getattr(module, "_load_state_dict_pre_hooks", None):
        return True
    owner = next(base for base in type(module).__mro__ if "_load_from_state_dict" in vars(base))
    # torch's norms only add num_batches_tracked to the states of older versions.
    return not owner.__module__.startswith("torch.nn.modules.")

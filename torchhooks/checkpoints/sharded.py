"""Models whose parameters are DTensors, as FSDP2 makes them, in files of torch.distributed.checkpoint.

Each rank writes its shards, and a tensor that all ranks have is written by one of them. The plan and the results are
exchanged between these steps by the caller, so that a rank that fails is noticed. Tensors have the names of the
bare model, without what DistributedDataParallel and torch.compile put before them, so that the files fit any of these.

Only tensors are in these files. They are read without running code from them: see :class:`_Unpickler`.
"""

from __future__ import annotations

import copy
import importlib
import os
import pickle
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from torchhooks.common.errors import DamagedCheckpointError
from torchhooks.common.stateful import Stateful
from torchhooks.common.trees import Tree
from torchhooks.fetches.names import canonical, parameters_of
from torchhooks.ranks.ranks import dtensors_exist, is_sharded

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

_METADATA = ".metadata"
_PICKLED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"PosixPath", "WindowsPath"},
}


def unreduced_gradients(modules: Iterable[torch.nn.Module]) -> list[tuple[object, str]]:
    """Return where FSDP2 keeps gradients that it has not reduced over the ranks yet: objects, and their attributes.

    That is between two backward passes of an accumulation, after ``set_requires_gradient_sync(False)`` or
    ``set_requires_all_reduce(False)``. No checkpoint has them: torch has no public way to read or to set them.
    """
    wrapped: list[Any] = [each for module in modules for each in module.modules() if hasattr(each, "_get_fsdp_state")]
    states = [each._get_fsdp_state() for each in wrapped]  # noqa: SLF001 - torch has no other way to ask
    # Newer versions of torch have several groups for a module.
    groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]  # noqa: SLF001 - as above
    found: list[tuple[object, str]] = []
    for group in (each for several in groups for each in several if each is not None):
        found.append((group, "_partial_reduce_output"))
        for each in group.fsdp_params:
            found += [(each, "unsharded_accumulated_grad"), (getattr(each, "_unsharded_param", None), "grad")]
    return [(owner, name) for owner, name in found if getattr(owner, name, None) is not None]


def sharded_parts(parts: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """Return what of ``parts``, by name, has DTensors: modules, and optimizers of their parameters."""
    found: dict[str, Stateful] = {}
    if not dtensors_exist():
        return found
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            tensors: list[torch.Tensor] = [*part.parameters(), *part.buffers()]
        elif isinstance(part, torch.optim.Optimizer):
            tensors = parameters_of(part)
        else:
            continue
        if any(map(is_sharded, tensors)):
            found[name] = part
    return found


def _dcp() -> ModuleType:
    return importlib.import_module("torch.distributed.checkpoint")  # not loaded before it is needed


def like_own(part: object, state: Tree) -> Tree:
    """Return ``state`` with this rank's DTensors in place of whole tensors, where ``part`` has DTensors.

    Not a collective.
    """
    if not dtensors_exist():
        return state
    if isinstance(part, torch.nn.Module):
        own = part.state_dict()
        if not any(map(is_sharded, own.values())):
            return state
        new = copy.copy(state)  # with the versions of the modules, an attribute
        new.update({name: _like(own.get(name), value) for name, value in state.items()})
        return new
    if not isinstance(part, torch.optim.Optimizer):
        return state
    parameters = parameters_of(part)
    ids = [number for group in state["param_groups"] for number in group["params"]]
    if not any(map(is_sharded, parameters)):
        return state
    by_id = dict(zip(ids, parameters, strict=True))
    moments = {
        number: {key: _like(by_id[number], value) for key, value in each.items()}
        for number, each in state["state"].items()
    }
    return {**state, "state": moments}


def _like(own: Tree, value: Tree) -> Tree:
    if not is_sharded(own) or is_sharded(value) or not isinstance(value, torch.Tensor) or value.shape != own.shape:
        return value
    value = value.to(own.device_mesh.device_type)
    # Without a source, each rank cuts its part out of its own whole tensor. By default, rank 0 would send the parts,
    # which is a collective.
    return torch.distributed.tensor.distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def split(parts: Mapping[str, Stateful], is_chief: bool) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Return the tensors of ``parts`` that this rank writes, and what else they have, which is plain data.

    The chief alone writes tensors that are not sharded, such as buffers: each rank may have its own values, of which
    torch.distributed.checkpoint would write any rank's.
    """
    names = _names_of(parts)
    tensors: dict[str, Tree] = {}
    rest: dict[str, Tree] = {}
    for part_name, part in parts.items():
        state: Tree = part.state_dict()
        if isinstance(part, torch.nn.Module):
            own = {canonical(name): value for name, value in state.items()}
            mine = {name: value for name, value in own.items() if is_chief or is_sharded(value)}
            tensors[part_name] = {name: value for name, value in mine.items() if isinstance(value, torch.Tensor)}
            rest[part_name] = {name: value for name, value in own.items() if not isinstance(value, torch.Tensor)}
            continue
        assert isinstance(part, torch.optim.Optimizer)  # sharded_parts() returns no others
        # In the files, the state of a parameter is under its name: read_tensors() finds by the name how the parameter
        # is sharded now, which may be in another way than when it was saved.
        order = [names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters_of(part))]
        ids = [number for group in state["param_groups"] for number in group["params"]]
        moments = {order[ids.index(number)]: each for number, each in state["state"].items()}
        tensors[part_name] = {"state": {name: _tensors(each, is_chief) for name, each in moments.items()}}
        others = {
            number: {key: value for key, value in each.items() if not isinstance(value, torch.Tensor)}
            for number, each in state["state"].items()
        }
        rest[part_name] = {**state, "state": others, "order": order}
    return tensors, rest


def _tensors(values: Mapping[str, Tree], is_chief: bool) -> dict[str, torch.Tensor]:
    found = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
    return {key: value for key, value in found.items() if is_chief or is_sharded(value)}


def _names_of(parts: Mapping[str, Stateful]) -> dict[int, str]:
    modules = [part for part in parts.values() if isinstance(part, torch.nn.Module)]
    return {id(tensor): canonical(name) for module in modules for name, tensor in module.named_parameters()}


class ShardWriter:
    """Writes the tensors of one rank into ``folder``.

    The methods are called in order, and what each returns is gathered from all ranks before the next.
    """

    def __init__(self, tensors: dict[str, Tree], folder: str, is_chief: bool) -> None:
        dcp = _dcp()
        self._planner = dcp.DefaultSavePlanner()
        self._writer = dcp.FileSystemWriter(
            folder, sync_files=True
        )  # before the manifest, which says that they are whole
        self._folder, self._tensors, self._is_chief = folder, tensors, is_chief
        self._metadata: Metadata | None = None

    def plan(self) -> SavePlan:
        """Return this rank's save plan: which shards it can write."""
        self._planner.set_up_planner(self._tensors, self._writer.storage_meta(), self._is_chief)
        self._writer.set_up_storage_writer(self._is_chief)
        plan: SavePlan = self._writer.prepare_local_plan(self._planner.create_local_plan())
        return plan

    def assign(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each tensor to one writer: return the plan of each rank. Chief only."""
        plans, self._metadata = self._planner.create_global_plan(plans)
        return list(self._writer.prepare_global_plan(plans))

    def write(self, plan: SavePlan) -> list[WriteResult]:
        """Write this rank's tensors of ``plan``, and return where they are."""
        written = self._writer.write_data(self._planner.finish_plan(plan), self._planner)
        written.wait()
        results: list[WriteResult] = written.value()
        return results

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Write the file that says where each tensor is. Chief only."""
        self._writer.finish(self._metadata, results)


def shards_of(rank: int, folder: str) -> list[str]:
    """Return the names of the files with tensors that ``rank`` has written into ``folder``."""
    shards = [name for name in os.listdir(folder) if name.startswith(f"__{rank}_")]
    return [*shards, *([_METADATA] if rank == 0 else [])]


def read_tensors(
    folder: str,
    saved: dict[str, Tree],
    parts: Mapping[str, Stateful],
    others: Mapping[tuple[str, ...], torch.Tensor],
) -> None:
    """Fill the entries of ``saved`` that :func:`split` returned with the tensors in ``folder``.

    Where ``parts`` have DTensors, only the shards of this rank are read. ``others`` are further DTensors, by their path
    in the files.
    """
    dcp = _dcp()
    # DCP writes this file with pickle, and weights_only=True of torch.load() is not for it. So what may be in it is
    # limited here, before any of it is used.
    with open(os.path.join(folder, _METADATA), "rb") as file:
        metadata: Any = _Unpickler(file).load()
    for stored in metadata.storage_data.values():
        # The reader of DCP would open a file at any path that is here.
        if os.path.basename(stored.relative_path) != stored.relative_path:
            raise DamagedCheckpointError(
                f"{folder} is damaged: its metadata name tensors in {stored.relative_path!r}, outside of the folder"
            )
    names = _names_of(parts)
    own = dict(others)
    for part_name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            own |= {(part_name, canonical(name)): value for name, value in part.state_dict().items()}
        elif isinstance(part, torch.optim.Optimizer):
            own |= {(part_name, names.get(id(parameter), "")): parameter for parameter in parameters_of(part)}
    wanted: dict[str, torch.Tensor] = {}
    paths: list[tuple[str, ...]] = []
    for key, path in metadata.planner_data.items():
        about, path = metadata.state_dict_metadata[key], tuple(map(str, path))
        like: Any = own.get(path) if len(path) == 2 else own.get((path[0], path[2]))
        if is_sharded(like) and like.shape == about.size:
            tensor = torch.empty_like(like, dtype=about.properties.dtype, requires_grad=False)
        else:
            tensor = torch.empty(about.size, dtype=about.properties.dtype)
        wanted[key] = tensor
        paths.append(path)
    # What dcp.load() does, which would unpickle whatever is in the file of the metadata.
    planner, reader = dcp.DefaultLoadPlanner(), dcp.FileSystemReader(folder)
    # Each rank plans alone, as its own coordinator. So nothing here is a collective, and one rank can read other
    # tensors than another.
    planner.set_up_planner(wanted, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()
    for path, tensor in zip(paths, wanted.values(), strict=True):
        entry = saved[path[0]]
        if len(path) == 2:
            entry[path[1]] = tensor
        else:
            number = [each for group in entry["param_groups"] for each in group["params"]][
                entry["order"].index(path[2])
            ]
            entry["state"].setdefault(number, {})[path[3]] = tensor
    for entry in saved.values():
        if isinstance(entry, dict) and "order" in entry and "param_groups" in entry:
            del entry["order"]


class _Unpickler(pickle.Unpickler):
    """Reads the metadata of torch.distributed.checkpoint, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # where Python 3.13 has the classes of pathlib
            module = "pathlib"
        if name in _PICKLED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint")

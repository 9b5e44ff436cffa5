"""Digests of values: equal for equal values, and almost surely another one if a bit or an order differs.

An object is a node of a graph, whose label says what it is and whose edges lead to what it consists of, as
:mod:`torchhooks.common.members` reads it. Nodes are hashed from the leaves up, each once, so that neither identity nor
the order of a set counts, nothing recurses, and the time grows with the number of objects. Objects that refer to one
another are told apart as the states of an automaton are: by where their edges lead, as long as that separates any.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from torchhooks.common.members import ORDERED, PAIRS, UNORDERED, Members, is_a, is_atom, members_of, name_of
from torchhooks.common.memory import bytes_of

_CHUNK = 1 << 22  # elements of a tensor on a device that are mixed at a time: each takes eight bytes or more
_MIX = -7046029254386353131  # 2**64 over the golden ratio, an odd number whose bits are well mixed
_SIZE = 8  # bytes of a hash
# What _hash_of() appends to the label of a node without parts. Leaves are hashed without a call of it, which is faster.
_NO_PARTS = bytes(4)
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_TENSOR_TYPE, _ARRAY_TYPES = torch.Tensor, (np.ndarray, np.generic)
WIDTH = 2 * _SIZE
"""How many characters a digest has."""
MOST_VALUES = 1_000_000


class TooManyValuesError(Exception):
    """An object consists of more values than are read. It has no digest, rather than one of a part of it."""


def digest(value: object, *, ordered: bool = False) -> str:
    """Return the digest of ``value``. Waits for the device that a tensor in it is on.

    Args:
        value: any object.
        ordered: whether the order of the keys of dicts counts.

    Raises:
        TooManyValuesError: it consists of more than a million values.
    """
    return digests([value], ordered=ordered)[0]


def digests(values: Iterable[object], *, ordered: bool = False) -> list[str]:
    """Return the digest of each of ``values``, with one wait for each device.

    Draws no random number, and iterates over nothing that is used up by it. Elements of a tensor on the CPU are read as
    bytes, and those of one on a device are mixed and added up there. So a tensor has another digest in another place.

    Raises:
        TooManyValuesError: one of them consists of more than a million values.
    """
    begun = [BegunDigest(value, ordered=ordered) for value in values]
    sums = [each for one in begun for each in one.sums]
    numbers: dict[int, int] = {}
    for device in {each.device for each in sums}:
        there = [each for each in sums if each.device == device]
        numbers |= zip(map(id, there), torch.stack(there).tolist(), strict=True)
    return [one.finish([numbers[id(each)] for each in one.sums]) for one in begun]


KnownSums = dict[int, tuple[int, torch.Tensor]]
"""The sums of tensors by their ids, with the tensors: the id of a tensor that is gone may be that of another one."""


class BegunDigest:
    """The digest of ``value``, complete but for the tensors that are on a device. Does not wait for the device.

    Args:
        value: any object.
        known: the sums of tensors on the CPU, for several values with the same tensors. A tensor that changes in
            place between two of them needs another dict.
        ordered: whether the order of the keys of dicts counts.

    Raises:
        TooManyValuesError: it consists of more than a million values.
    """

    def __init__(self, value: object, known: KnownSums | None = None, *, ordered: bool = False) -> None:
        known = {} if known is None else known
        self.sums: list[torch.Tensor] = []
        """For each tensor on a device, the sum of its mixed elements there."""
        # Not if the order of keys counts: the fast way sorts them.
        self._hash = None if ordered else _hash_of_batch(value, known)
        if self._hash is not None:
            return
        self._graph = graph = ValueGraph(known, ordered=ordered)
        self._root = graph.add(value)
        self.sums = graph.sums
        # The sums may arrive many runs later. Until then, the objects would keep the batch, and what else they refer
        # to, in memory.
        graph.forget_objects()

    def finish(self, numbers: Iterable[int]) -> str:
        """Return the digest, given the values of :attr:`sums`, which have arrived on the host. Called once."""
        return (self._graph.hashes(numbers)[self._root] if self._hash is None else self._hash).hex()


class ValueGraph:
    """The objects that some values consist of, as numbered nodes.

    Args:
        known: the sums of tensors on the CPU that are known already.
        ordered: whether the order of the keys of dicts counts.
        read: what returns the members of an object that is neither an atom nor a tensor.
        most: how many nodes there may be.
    """

    def __init__(
        self,
        known: KnownSums | None = None,
        *,
        ordered: bool = False,
        read: Callable[[object], Members] = members_of,
        most: int = MOST_VALUES,
    ) -> None:
        self.labels: list[str] = []
        self.children: list[Sequence[int]] = []
        self.orders: list[int] = []
        self.sums: list[torch.Tensor] = []
        self._nodes_of_sums: list[int] = []
        self._known = {} if known is None else known
        self._ordered, self._read, self._most = ordered, read, most
        self._nodes: dict[int, int] = {}  # by the id of the object
        self._objects: list[object] = []  # alive as long as their ids are compared
        self.fixed: dict[int, bytes] = {}
        """The hashes of nodes that are known, and were not expanded."""
        self._is_tree = True  # no edge leads to a node that is earlier than its own

    def add(self, value: object) -> int:
        """Add ``value`` and all that it consists of, breadth first, and return its node."""
        objects, labels = self._objects, self.labels
        node = len(objects)
        root = self._node(value)
        while node < len(objects):
            # An atom has its label already, from _node().
            if not labels[node]:
                self._expand(node, objects[node])
            node += 1
        return root

    def _expand(self, node: int, value: Any) -> None:
        kind = type(value)
        if kind is _TENSOR_TYPE or is_a(kind, _TENSOR_TYPE):
            members = self._tensor(node, value)
            if members is None:
                return
        else:
            members = _array(value) if is_a(kind, *_ARRAY_TYPES) else self._read(value)
        self.labels[node] = members.label
        if len(members.children) > _LONG and members.order != ORDERED and not self._ordered:
            text = _text_of_atoms(members)
            if text is not None:
                self.labels[node] += text
                return
        if members.children:
            self.children[node] = children = [*map(self._node, members.children)]
            if self._is_tree and min(children) <= node:
                self._is_tree = False
            self.orders[node] = ORDERED if members.order == PAIRS and self._ordered else members.order

    def _node(self, value: object) -> int:
        """Return the node of ``value``, a new one if it was not added before."""
        objects = self._objects
        node = len(objects)
        if is_atom(value):
            # A new node for each place of an atom. With one node for all, an edge to it could lead back, and fewer
            # graphs would be trees, which are hashed faster.
            self.labels.append(atom_text(value))
            value = None
        else:
            known = self._nodes.setdefault(id(value), node)
            if known != node:
                return known
            self.labels.append("")
        if node >= self._most:
            raise TooManyValuesError(f"more than {self._most} values")
        objects.append(value)
        self.children.append(())
        self.orders.append(ORDERED)
        return node

    def _tensor(self, node: int, tensor: torch.Tensor) -> Members | None:
        if has_plain_elements(tensor):
            if tensor.is_cpu:
                self.labels[node] = _label_of(tensor, self._known)
            else:
                self.labels[node] = f"tensor {_DTYPES[tensor.dtype]} {(*tensor.shape,)}"
                self.sums.append(mixed_sum(_bits(tensor)))
                self._nodes_of_sums.append(node)
            return None
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - no operator of a class of the script is called
            return _parts_of(tensor)

    def forget_objects(self) -> None:
        """Drop the objects. No value can be added after this."""
        self._objects, self._nodes, self._known = [], {}, {}

    def hashes(self, numbers: Iterable[int] = ()) -> list[bytes]:
        """Return the hash of each node, given the values of :attr:`sums`. Called once."""
        for node, number in zip(self._nodes_of_sums, numbers, strict=True):
            self.labels[node] += f" {number}"
        hashed: list[bytes] = [b""] * len(self.labels)
        if self._is_tree:
            # Backwards: no edge leads to an earlier node here, so the parts of a node are hashed before it.
            for node in range(len(hashed) - 1, -1, -1):
                hashed[node] = self._hash(node, hashed)
            return hashed
        for component in _components(self.children):
            if len(component) > 1 or component[0] in self.children[component[0]]:
                self._hash_circle(component, hashed)
            else:
                hashed[component[0]] = self._hash(component[0], hashed)
        return hashed

    def _hash(self, node: int, hashed: Sequence[bytes] | _Either) -> bytes:
        """Return the hash of ``node``, given the hashes of its children."""
        # A str may have lone surrogates, such as the name of a file that is not UTF-8.
        label = self.labels[node].encode("utf-8", "surrogatepass")
        children = self.children[node]
        if node in self.fixed:
            return self.fixed[node]
        if not children:
            return blake2b(label + _NO_PARTS, digest_size=_SIZE).digest()
        parts = [hashed[child] for child in children]
        order = self.orders[node]
        if order == UNORDERED:
            parts.sort()
        elif order == PAIRS:
            parts = sorted(one + other for one, other in zip(parts[::2], parts[1::2], strict=True))
        return _hash_of(label, *parts)

    def _hash_circle(self, component: Sequence[int], hashed: list[bytes]) -> None:
        """Hash nodes that refer to one another. All edges that lead out of ``component`` lead to hashed nodes."""
        for node in component:
            # Any hash will do, if it is the same for all: the labels must not depend on where in the circle a node is.
            hashed[node] = bytes(_SIZE)
        labels = {node: self._hash(node, hashed) for node in component}
        edges = {node: [child for child in self.children[node] if child in labels] for node in component}
        # First which nodes are equal, then names for them in which it does not count how many are equal to one another.
        names = _told_apart(labels, edges, lambda node, names: self._hash(node, _Either(names, hashed)))
        first = {name: node for node, name in names.items()}
        of_node = {node: first[name] for node, name in names.items()}

        def signature(node: int, names: Mapping[int, bytes]) -> bytes:
            return self._hash(node, _Either(names, hashed, of_node))

        states = {node: labels[node] for node in first.values()}
        edges = {node: [of_node[child] for child in edges[node]] for node in states}
        names = _told_apart(states, edges, signature)
        # The states with their names are the automaton, whatever order they were visited in.
        automaton = _hash_of(b"circle", *sorted(name + signature(node, names) for node, name in names.items()))
        for node in component:
            hashed[node] = _hash_of(names[of_node[node]], automaton)


class _Either:
    """The names of the nodes of a circle, and the hashes of all others."""

    def __init__(
        self, names: Mapping[int, bytes], hashed: Sequence[bytes], of_node: Mapping[int, int] | None = None
    ) -> None:
        self._names, self._hashed, self._of_node = names, hashed, of_node

    def __getitem__(self, node: int) -> bytes:
        if self._of_node is not None:
            node = self._of_node.get(node, node)
        name = self._names.get(node)
        return self._hashed[node] if name is None else name


def _told_apart(
    labels: Mapping[int, bytes],
    edges: Mapping[int, Sequence[int]],
    signature: Callable[[int, Mapping[int, bytes]], bytes],
) -> dict[int, bytes]:
    """Return names for nodes, which are equal where nothing that the nodes lead to tells them apart.

    Nodes of one name are split where their edges lead to other names. The largest part keeps the name, so that what
    leads to it need not be looked at again: otherwise a list of links would take the square of its length.
    """
    names = dict(labels)
    leading: dict[int, list[int]] = {node: [] for node in labels}
    for node, children in edges.items():
        for child in children:
            leading[child].append(node)
    of_name: dict[bytes, set[int]] = {}
    for node, name in names.items():
        of_name.setdefault(name, set()).add(node)
    known: dict[bytes, bytes] = {}  # by name, the signature of its nodes
    changed: set[int] = {*labels}
    while changed:
        parts_of: dict[bytes, dict[bytes, list[int]]] = {}
        for node in changed:
            parts_of.setdefault(names[node], {}).setdefault(signature(node, names), []).append(node)
        renamed: list[tuple[bytes, bytes, Iterable[int]]] = []
        for name, parts in parts_of.items():
            sizes = {each: len(nodes) for each, nodes in parts.items()}
            rest = len(of_name[name]) - sum(sizes.values())
            if rest:
                sizes[known[name]] = sizes.get(known[name], 0) + rest
            # Of equally large parts, the one with the larger signature, so that the names do not depend on the order of
            # the nodes.
            largest = max(sizes, key=lambda each: (sizes[each], each))
            if rest and largest != known[name]:
                unchanged = of_name[name].difference(*parts.values())
                parts.setdefault(known[name], []).extend(unchanged)
            parts.pop(largest, None)
            known[name] = largest
            renamed += [(name, each, nodes) for each, nodes in parts.items()]
        changed = set()
        for name, each, nodes in renamed:
            new = _hash_of(name, each)
            of_name[name].difference_update(nodes)
            of_name[new], known[new] = set(nodes), each
            for node in nodes:
                names[node] = new
                changed.update(leading[node])
    return names


def _hash_of(label: bytes, *parts: bytes) -> bytes:
    # The number of parts, each as long as the others, says where the label ends.
    return blake2b(b"%b%b%b" % (label, b"".join(parts), len(parts).to_bytes(4, "big")), digest_size=_SIZE).digest()


def _components(children: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield the nodes that refer to one another, each such set after all that its nodes lead to (Tarjan, 1972)."""
    order = [-1] * len(children)  # in which nodes are visited
    lowest = [0] * len(children)  # of all that a node leads to and that is no part of an earlier component
    is_open = [False] * len(children)
    path: list[int] = []
    count = 0
    for start in range(len(children)):
        if order[start] >= 0:
            continue
        # A list instead of recursion, because a long chain of objects is deeper than Python's limit.
        work = [(start, iter(children[start]))]
        order[start] = lowest[start] = count
        count += 1
        path.append(start)
        is_open[start] = True
        while work:
            node, rest = work[-1]
            for child in rest:
                if order[child] < 0:
                    order[child] = lowest[child] = count
                    count += 1
                    path.append(child)
                    is_open[child] = True
                    work.append((child, iter(children[child])))
                    break
                if is_open[child]:
                    lowest[node] = min(lowest[node], order[child])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[node])
                if lowest[node] == order[node]:
                    at = len(path) - 1
                    while path[at] != node:
                        at -= 1
                    component = path[at:]
                    del path[at:]
                    for each in component:
                        is_open[each] = False
                    yield component


_LONG = 2000  # of a dict or a set whose members are read as one text, if they are nothing but numbers and strings


def _text_of_atoms(members: Members) -> str | None:
    """Return one text of the members of a dict or a set in no order; ``None`` if one of them has members itself."""
    children = members.children
    if not all(map(is_atom, children)):
        return None
    # Of a dict, zip() takes from this one iterator twice: a key, and its value.
    texts = map(atom_text, children)
    ordered = sorted(zip(texts, texts, strict=True)) if members.order == PAIRS else sorted(texts)
    return f" {len(children)} {blake2b(repr(ordered).encode(), digest_size=_SIZE).hexdigest()}"


# -- batches ----------------------------------------------------------------------------------------------------------


def _hash_of_batch(value: Any, known: KnownSums) -> bytes | None:
    """Return the hash that :class:`ValueGraph` makes of a batch, in half the time; ``None`` for other values.

    A batch is a tensor on the CPU, or a tuple, list or dict of tensors, numbers and strings.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        parts = [_hash_of_leaf(each, known) for each in value]
        # Of nothing but numbers and strings, a sequence has one text.
        return None if None in parts or all(map(is_atom, value)) else _hash_of(_NAMES[kind], *parts)  # type: ignore[arg-type]
    if kind is dict:
        parts = [_hash_of_leaf(each, known) for pair in value.items() for each in pair]
        if None in parts or not parts:
            return None
        pairs = sorted(one + other for one, other in zip(parts[::2], parts[1::2], strict=True))  # type: ignore[operator]
        return _hash_of(_NAMES[kind], *pairs)
    return _hash_of_leaf(value, known) if kind is _TENSOR_TYPE else None


_NAMES: dict[type, bytes] = {tuple: b"tuple", list: b"list", dict: b"dict"}


def _hash_of_leaf(value: Any, known: KnownSums) -> bytes | None:
    if is_atom(value):
        label = atom_text(value)
    elif type(value) is _TENSOR_TYPE and value.is_cpu and has_plain_elements(value):
        label = _label_of(value, known)
    else:
        return None
    return blake2b(label.encode("utf-8", "surrogatepass") + _NO_PARTS, digest_size=_SIZE).digest()


# -- leaves -----------------------------------------------------------------------------------------------------------


def atom_text(value: Any) -> str:
    """Return the type and the value of a number, a string, bytes or ``None``."""
    kind = type(value)
    # Not repr() of an integer, which Python limits to 4300 digits.
    return f"int {value:x}" if kind is int else f"{kind.__name__} {value!r}"


class _Dtypes(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        self[dtype] = text = str(dtype)
        return text


_DTYPES = _Dtypes()


def _array(value: Any) -> Members:
    """Return the members of an array of NumPy, or of a number of it, which counts as Python's."""
    if not isinstance(value, np.ndarray):
        number = value.item()
        if is_atom(number):
            return Members(atom_text(number))
        return Members(f"{name_of(type(value))} {value!r}")  # a date, a record, or more digits than Python's float has
    kind = type(value)
    # The attributes of a memmap say which file has its elements, and where. That does not count.
    attributes = () if kind is np.ndarray or kind is np.memmap else (getattr(value, "__dict__", {}),)
    array = np.asarray(value)
    label = f"array {array.dtype} {array.shape}"
    # The memory of such an array has addresses, which differ for equal objects.
    if array.dtype.hasobject:
        return Members(label, (array.reshape(-1).tolist(), *attributes))
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""
    return Members(f"{label} {zlib.crc32(data):08x}", attributes)


def has_plain_elements(tensor: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` are in its memory, one after the other."""
    return (
        type(tensor) in _TENSORS
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    )


def _parts_of(tensor: torch.Tensor) -> Members:
    """Return the tensors that one consists of whose elements are not simply in its memory."""
    kind: Any = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return Members(f"tensor {tensor.dtype} without a shape")
    label = f"tensor {tensor.dtype} {'nested' if tensor.is_nested else (*tensor.shape,)}"
    if tensor.is_meta:
        return Members(f"{label} without elements")
    if kind not in _TENSORS:
        parts: Any = tensor
        if hasattr(kind, "to_local"):
            return Members(label, (parts.to_local(),))  # this rank's part of a DTensor
        if hasattr(kind, "__tensor_flatten__"):
            names, _ = parts.__tensor_flatten__()
            return Members(label, [getattr(parts, name) for name in names])
        return Members(name_of(kind), (tensor.detach().as_subclass(torch.Tensor),))
    tensor = tensor.detach()
    if tensor.is_nested:
        return Members(label, tensor.unbind())
    if tensor.is_quantized:
        # Both, because the integers alone do not tell the scale.
        return Members(label, (tensor.int_repr(), tensor.dequantize()))
    if tensor.layout is torch.sparse_coo:
        # The order in which the entries were added, and entries of one place that are not added up yet, do not count.
        whole = tensor.coalesce()
        return Members(f"{label} sparse", (whole.indices(), whole.values()))
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return Members(f"{label} rows", (tensor.crow_indices(), tensor.col_indices(), tensor.values()))
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return Members(f"{label} columns", (tensor.ccol_indices(), tensor.row_indices(), tensor.values()))
    return Members(label, (tensor.to_dense(),))


def _label_of(tensor: torch.Tensor, known: KnownSums) -> str:
    """Return the label of a tensor on the CPU, which has its elements."""
    found, _ = known.get(id(tensor), (None, None))
    if found is None:
        found = sum_on_host(tensor)
        known[id(tensor)] = found, tensor
    return f"tensor {_DTYPES[tensor.dtype]} {(*tensor.shape,)} {found:08x}"


def sum_on_host(tensor: torch.Tensor) -> int:
    """Return the sum of the bytes of ``tensor``, which is on the CPU and has plain elements."""
    is_plain = tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
    return zlib.crc32(bytes_of(tensor if is_plain else _bits(tensor)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    # Integers of the same bits, so that 0.0 and -0.0 differ, and one NaN from another.
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64))


def mixed_sum(bits: torch.Tensor) -> torch.Tensor:
    """Return the sum of the mixed integers ``bits``, each with its place. Does not wait for the device.

    Mixing a place and an element is invertible, so that one other element always changes the sum. It is not linear, so
    that elements that change places almost surely do.
    """
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        mixed = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=bits.device)
        mixed.mul_(_MIX).bitwise_xor_(chunk)
        for _ in range(2):
            # The masks drop the copies of the sign that torch shifts in: it has no unsigned shift of an int64.
            mixed.bitwise_xor_((mixed >> 32) & 0xFFFFFFFF).mul_(_MIX)
        total += mixed.bitwise_xor_((mixed >> 29) & 0x7FFFFFFFF).sum()
    return total

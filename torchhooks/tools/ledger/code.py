"""What the code of a script does with its variables: which of them a ``for`` sets, and which are not read any more.

A variable that is set again before it is read is *dead* at that place: whatever it has there makes no difference. So a
variable that starts over, and is dead where a run is made, is no fault: a validation loss that each epoch computes.
"""

from __future__ import annotations

import bisect
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterator, Sequence

# The names are those of all versions of Python from 3.11 on: one that a version does not have does no harm.
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT")
_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
_KINDS = ("FAST", "NAME", "GLOBAL")
_PASSED = ("EXTENDED_ARG", "NOP", "CACHE", "COPY", "SWAP", "NOT_TAKEN")


def _accesses(step: dis.Instruction) -> Iterator[tuple[str, str]]:
    """Yield ``"LOAD"``, ``"STORE"`` or ``"DELETE"`` and the name of a variable, for each that ``step`` accesses."""
    words = step.opname.split("_")
    pairs = itertools.pairwise(words)
    actions = [one for one, kind in pairs if one in ("LOAD", "STORE", "DELETE") and kind in _KINDS]
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    # STORE_FAST_LOAD_FAST and its like, of Python 3.13, have two names.
    yield from zip(actions, names, strict=False)


@functools.lru_cache(256)
def names_set_by_for(code: types.CodeType) -> frozenset[str]:
    """Return the variables that the ``for`` loops of ``code`` set."""
    names: set[str] = set()
    steps = [*dis.get_instructions(code)]
    for place, step in enumerate(steps):
        left = 1
        for after in steps[place + 1 :] if step.opname == "FOR_ITER" else ():
            stored = [name for action, name in _accesses(after) if action == "STORE"]
            if after.opname == "UNPACK_SEQUENCE":
                left += (after.arg or 0) - 1
            elif after.opname == "UNPACK_EX":
                # The low byte has the number of names before the star, the rest that of those after it. The name with
                # the star is the one that was expected so far.
                left += ((after.arg or 0) & 0xFF) + ((after.arg or 0) >> 8)
            elif after.opname == "STORE_DEREF":
                stored = [after.argval]
            elif not stored and after.opname not in _PASSED:
                break
            names.update(stored[:left])
            left -= len(stored)
            if left <= 0:
                break
    return frozenset(names)


@functools.lru_cache(1024)
def names_dead_at(code: types.CodeType, place: int) -> frozenset[str]:
    """Return the variables of ``code`` that are set again before they are read, after the instruction at ``place``.

    Only those that no other function can read: no variable of a closure, and of a module none that its functions name.
    """
    steps = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    index = {step.offset: number for number, step in enumerate(steps)}
    # The place is the f_lasti of a frame, which may be in the cache of the call.
    at = bisect.bisect_right([step.offset for step in steps], place) - 1
    if at < 0:
        return frozenset()
    names = {name for step in steps for action, name in _accesses(step) if action == "STORE"}
    if code.co_flags & inspect.CO_NEWLOCALS:
        names &= {*code.co_varnames}  # no global variable, and none of a closure
    names -= {*code.co_cellvars, *_names_in(code.co_consts)}
    bits = {name: 1 << number for number, name in enumerate(sorted(names))}
    followed = [[*_after(steps, number, index)] for number in range(len(steps))]
    # Any instruction that a handler covers may raise, and then the handler reads variables.
    for start, end, target in _handlers(code):
        # A handler begins with PUSH_EXC_INFO, and the instruction after it says what it is for. What a with statement
        # does at its end reads nothing.
        if steps[index[target] + 1].opname != "WITH_EXCEPT_START":
            for number in range(index.get(start, 0), index.get(end, len(steps) - 1) + 1):
                followed[number].append(index[target])
    read, written = [0] * len(steps), [0] * len(steps)
    for number, step in enumerate(steps):
        for action, name in _accesses(step):
            bit = bits.get(name, 0)
            if action == "STORE":
                written[number] |= bit
            elif not written[number] & bit:
                read[number] |= bit
    live = [0] * len(steps)  # before a step
    changed = True
    while changed:
        changed = False
        for number in range(len(steps) - 1, -1, -1):
            after = 0
            for each in followed[number]:
                after |= live[each]
            now = read[number] | (after & ~written[number])
            if now != live[number]:
                live[number], changed = now, True
    here = 0
    # What is alive after the call, in which the run is made: the call itself has read its arguments already.
    for each in followed[at]:
        here |= live[each]
    return frozenset(name for name, bit in bits.items() if not here & bit)


def _after(steps: Sequence[dis.Instruction], number: int, index: dict[int, int]) -> Iterator[int]:
    step = steps[number]
    if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
        yield index[step.argval]
        if step.opname in _ALWAYS:
            return
    if step.opname not in _ENDS and number + 1 < len(steps):
        yield number + 1


def _handlers(code: types.CodeType) -> Iterator[tuple[int, int, int]]:
    """Yield where an error leads to: the first and the last offset of the code, and the offset of its handler."""
    # dis has no public function for this. Without it, a variable that only a handler reads would count as dead.
    parse = getattr(dis, "_parse_exception_table", None)
    for entry in () if parse is None else parse(code):
        # The end is the offset after the last instruction, and each has two bytes.
        yield entry.start, entry.end - 2, entry.target


def _names_in(constants: Sequence[object]) -> set[str]:
    """Return the names in the code of functions, which may be variables of the module that they are in."""
    names: set[str] = set()
    work = [*constants]
    while work:
        each = work.pop()
        if isinstance(each, types.CodeType):
            names.update(each.co_names)
            work += each.co_consts
    return names

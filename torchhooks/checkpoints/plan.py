"""What a CheckpointSaverHook does at a moment at which a checkpoint may be saved: one decision, which changes nothing.

:func:`plan_save` is the whole rule. The hook says what the situation is, and carries out what the function answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Moment(Enum):
    """When a checkpoint may be saved."""

    CREATED = "the session was created, or restored"
    DUE = "the period of the hook is over"
    STOP = "the loop stops, between two items"
    END = "the loop has ended without an error"


class Decision(Enum):
    """What to do."""

    ASK = "ask the ranks what they know, and decide then"
    NOTHING = "save nothing, and not later either unless the training run goes on"
    SKIP = "save nothing, because a checkpoint of this state is there, or the next one comes soon"
    WAIT = "save later: at the end of the item, or in one of the next runs"
    MARK = "only note in the last checkpoint that the training run is finished"
    SAVE = "save"


class Why(Enum):
    """The row of the table of :func:`plan_save` that has decided."""

    IN_ITEM = "the item is not over"
    FINISHED = "the training run was finished when it was restored"
    REPEATING = "the loop in which the restored one was saved has not begun"
    SAVED = "this step was saved or refused already"
    SAVED_BY_ANOTHER = "another saver of the folder has saved this step"
    WRITING = "the one before it is still being written"
    MEMORY = "memory for its copy is being pinned"
    REFUSED = "a hook refuses it"
    APART = "the ranks are in different loops"
    GRADIENTS = "gradients are not reduced yet"
    SAME_STATE = "the last checkpoint has the same state"
    NEW = "there is something to save"
    RANKS = "the ranks have not told each other what they know"


class RankView(NamedTuple):
    """What one rank knows. The ranks gather it, so that all of them decide alike."""

    refusal: str | None = None
    """Why a hook of this rank refuses the checkpoint, such as a NanTensorHook that has seen a NaN."""
    loops: tuple[int, ...] | None = None
    """The loops over data that this rank is in, outermost first."""
    has_listeners: bool = False
    """Whether something wants to be called for every checkpoint of the hook."""
    is_writing: bool = False
    """Whether this rank still writes the checkpoint before, and the hook skips saves meanwhile."""
    is_stopping: bool = False
    """Whether the loop stops on this rank."""
    lacks_memory: bool = False
    """Whether memory for a copy in the background is being pinned. Of several ranks, none says so."""
    has_unreduced_gradients: bool = False
    """Whether FSDP2 has not reduced the gradients of this rank, and the optimizer has made no step since."""
    is_unchanged: bool = False
    """Whether the state of this rank is, by its contents, what it saved last."""


class Situation(NamedTuple):
    """Where a training run is. All ranks know the same, but for :attr:`ranks`."""

    moment: Moment
    step: int
    """The global step."""
    finish: str | None = None
    """Why the training run is finished, as a checkpoint would say now."""
    was_finished: bool = False
    """Whether it was finished when it was restored, so that nothing has changed since."""
    is_repeating: bool = False
    """Whether a resumed script has not come to the loop of its checkpoint, which will be loaded a second time there."""
    is_in_item: bool = False
    """Whether the body of the ``for`` loop is not done with the item."""
    was_saved_by_another: bool = False
    """Whether another saver of the same folder has saved this step, and said the same of its end."""
    ranks: Sequence[RankView] = ()
    """What the ranks know; empty until they have told each other."""


class LastSave(NamedTuple):
    """What one CheckpointSaverHook did last."""

    step: int | None = None
    """The step of the last checkpoint that was saved in this session."""
    finish: str | None = None
    """Why the training run was finished, as that checkpoint says."""
    runs: int | None = None
    """How many runs the training run had made then."""
    decided_step: int | None = None
    """The step that was last saved or refused, in any session."""
    decided_finish: str | None = None
    """Why the training run was finished then."""


def plan_save(situation: Situation, last: LastSave) -> tuple[Decision, Why]:
    """Return whether to save. The first row that holds decides.

    ========  ================  =======================================================================================
    decision  row               if
    ========  ================  =======================================================================================
    WAIT      IN_ITEM           a save is due, and the item is not over: what holds at its end decides
    NOTHING   FINISHED          the training run was finished when it was restored: nothing has changed
    NOTHING   REPEATING         the second load is open: the restored checkpoint stays the one
    SKIP      SAVED             at the end: the step was refused, or was saved and says why the training run is finished
    ASK       RANKS             the rows below need to know what all ranks know
    SKIP      SAVED_BY_ANOTHER  another saver of the folder has saved this state, and no listener waits for this one
    SKIP      WRITING           a save is due, the one before it is still being written, and no rank stops
    WAIT      MEMORY            a save is due, and memory for its copy is being pinned
    NOTHING   REFUSED           a hook of any rank refuses it
    NOTHING   APART             the ranks are in different loops, so none of them could resume
    WAIT      GRADIENTS         a save is due, and a rank waits for the next step of the optimizer
    MARK      SAME_STATE        at the end: this step was saved, and no rank has another state since
    SAVE      NEW               otherwise
    ========  ================  =======================================================================================
    """
    ranks, step = situation.ranks, situation.step
    is_due, is_end = situation.moment is Moment.DUE, situation.moment is Moment.END
    # If the step was saved before the training run was finished, the checkpoint does not say so yet. Then this step is
    # not done with, and a process that is started again would take the training run for unfinished.
    is_said = situation.finish in (None, last.decided_finish)
    table = (
        (is_due and situation.is_in_item, Decision.WAIT, Why.IN_ITEM),
        (situation.was_finished, Decision.NOTHING, Why.FINISHED),
        (situation.is_repeating, Decision.NOTHING, Why.REPEATING),
        (is_end and last.decided_step == step and (last.step != step or is_said), Decision.SKIP, Why.SAVED),
        # The rows above depend only on what all ranks know alike, so either all ranks gather here or none of them does.
        # The rows below need the answers: of no ranks at all, all(...) would be true.
        (not ranks, Decision.ASK, Why.RANKS),
        (
            situation.was_saved_by_another and not any(each.has_listeners for each in ranks),
            Decision.SKIP,
            Why.SAVED_BY_ANOTHER,
        ),
        (
            is_due and any(each.is_writing for each in ranks) and not any(each.is_stopping for each in ranks),
            Decision.SKIP,
            Why.WRITING,
        ),
        # Only a save that is due is put off. At a stop and at the end, no later run could make it.
        (is_due and any(each.lacks_memory for each in ranks), Decision.WAIT, Why.MEMORY),
        (any(each.refusal is not None for each in ranks), Decision.NOTHING, Why.REFUSED),
        (len({each.loops for each in ranks}) > 1, Decision.NOTHING, Why.APART),
        (is_due and any(each.has_unreduced_gradients for each in ranks), Decision.WAIT, Why.GRADIENTS),
        (is_end and last.step == step and all(each.is_unchanged for each in ranks), Decision.MARK, Why.SAME_STATE),
    )
    return next(((decision, why) for holds, decision, why in table if holds), (Decision.SAVE, Why.NEW))

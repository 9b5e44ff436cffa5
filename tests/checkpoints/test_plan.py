"""plan_save: the table by which a CheckpointSaverHook decides, row by row, and what follows from each in a loop."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_threads import Hub, ThreadRanks, in_threads
from torch.optim.swa_utils import AveragedModel

from torchhooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    EvaluationHook,
    MonitoredLoop,
    Saver,
    Scaffold,
    StopAtStepHook,
    latest_checkpoint,
    load_weights,
)
from torchhooks.checkpoints.folder import list_checkpoints
from torchhooks.checkpoints.plan import Decision, LastSave, Moment, RankView, Situation, Why, plan_save
from torchhooks.checkpoints.saving import digest_of_state
from torchhooks.hooks import saving
from torchhooks.ranks.ranks import LoopRanks

CREATED, DUE, STOP, END = Moment
READY = RankView(loops=(0, 1))
"""A rank that can save."""

TABLE: list[tuple[Decision, Why, dict[str, Any], list[RankView], LastSave]] = [
    (Decision.WAIT, Why.IN_ITEM, {"moment": DUE, "is_in_item": True}, [], LastSave()),
    (Decision.NOTHING, Why.FINISHED, {"was_finished": True}, [READY], LastSave()),
    (Decision.NOTHING, Why.REPEATING, {"is_repeating": True}, [READY], LastSave()),
    # At the end: refused at this step; saved, and the training run is not finished; saved, and it says so.
    (Decision.SKIP, Why.SAVED, {"moment": END, "finish": "data ended"}, [], LastSave(decided_step=7)),
    (Decision.SKIP, Why.SAVED, {"moment": END}, [], LastSave(7, decided_step=7)),
    (Decision.SKIP, Why.SAVED, {"moment": END, "finish": "a"}, [], LastSave(7, decided_step=7, decided_finish="a")),
    (Decision.ASK, Why.RANKS, {"moment": END}, [], LastSave(6, decided_step=6)),
    (Decision.SKIP, Why.SAVED_BY_ANOTHER, {"was_saved_by_another": True}, [READY, READY], LastSave()),
    (Decision.SKIP, Why.WRITING, {"moment": DUE}, [READY, READY._replace(is_writing=True)], LastSave()),
    (Decision.WAIT, Why.MEMORY, {"moment": DUE}, [READY._replace(lacks_memory=True)], LastSave()),
    (Decision.NOTHING, Why.REFUSED, {}, [READY, READY._replace(refusal="NaN")], LastSave()),
    (Decision.NOTHING, Why.APART, {}, [READY, READY._replace(loops=(0, 2))], LastSave()),
    (Decision.WAIT, Why.GRADIENTS, {"moment": DUE}, [READY, READY._replace(has_unreduced_gradients=True)], LastSave()),
    (
        *(Decision.MARK, Why.SAME_STATE, {"moment": END, "finish": "data ended"}),
        *([READY._replace(is_unchanged=True)] * 2, LastSave(7, decided_step=7)),
    ),
    (Decision.SAVE, Why.NEW, {}, [READY, READY], LastSave()),
    # What does not hold is not taken for it.
    (Decision.ASK, Why.RANKS, {"moment": STOP, "is_in_item": True}, [], LastSave(7, decided_step=7)),
    (
        *(Decision.SAVE, Why.NEW, {"was_saved_by_another": True}),
        *([READY, READY._replace(has_listeners=True)], LastSave()),
    ),
    (
        *(Decision.SAVE, Why.NEW, {"moment": DUE}),
        *([READY._replace(is_stopping=True), READY._replace(is_writing=True)], LastSave()),
    ),
    (Decision.SAVE, Why.NEW, {"moment": STOP}, [READY._replace(is_writing=True, lacks_memory=True)], LastSave()),
    (Decision.SAVE, Why.NEW, {"moment": STOP}, [READY._replace(has_unreduced_gradients=True)], LastSave()),
    (
        *(Decision.SAVE, Why.NEW, {"moment": END, "finish": "data ended"}),
        *([READY._replace(is_unchanged=True), READY], LastSave(7, decided_step=7)),
    ),
    (Decision.SAVE, Why.NEW, {"moment": END}, [READY._replace(is_unchanged=True)], LastSave(6, decided_step=6)),
]


@pytest.mark.parametrize(("decision", "why", "given", "ranks", "last"), TABLE)
def test_each_row_of_the_table(
    decision: Decision, why: Why, given: dict[str, Any], ranks: list[RankView], last: LastSave
) -> None:
    situation = Situation(**{"moment": CREATED, "step": 7, **given}, ranks=ranks)
    assert plan_save(situation, last) == (decision, why)


def test_every_row_of_the_docstring_is_tested_and_the_rows_are_in_its_order() -> None:
    assert plan_save.__doc__ is not None
    rows = re.findall(r"^    (NOTHING|SKIP|WAIT|ASK|MARK|SAVE)\s+([A-Z_]+) ", plan_save.__doc__, re.MULTILINE)
    assert rows == [*dict.fromkeys((decision.name, why.name) for decision, why, *_ in TABLE)]
    assert {name for _, name in rows} == {why.name for why in Why}


def test_a_row_wins_over_all_rows_below_it() -> None:
    facts = {why: (given, ranks, last) for _, why, given, ranks, last in reversed(TABLE)}
    for why, lower in itertools.combinations([why for _, why, *_ in TABLE[:15]], 2):
        (given, ranks, last), (more, other_ranks, _) = facts[why], facts[lower]
        moments = {given.get("moment", more.get("moment", CREATED)), more.get("moment", given.get("moment", CREATED))}
        if why is Why.RANKS or len(moments) > 1:
            continue  # no situation is both
        both = [_union(*views) for views in itertools.zip_longest(ranks, other_ranks, fillvalue=READY)]
        situation = Situation(**{"step": 7, **more, **given, "moment": moments.pop()}, ranks=both)
        assert plan_save(situation, last)[1] is why, (why, lower)


def _union(one: RankView, other: RankView) -> RankView:
    """Return a view with what is unusual in either."""
    usual, more = READY._asdict(), other._asdict()
    both = {name: more[name] if mine == usual[name] else mine for name, mine in one._asdict().items()}
    return RankView(**both)


# -- MARK: by the contents --------------------------------------------------------------------------------------------


class Count(CheckpointSaverListener):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_save(self, session: Any, step: int) -> None:
        self.steps.append(step)


Change = Callable[[torch.nn.Linear, torch.optim.Optimizer, AveragedModel], object]


def finish(folder: Path, change: Change | None = None, hooks: Any = (), **saver: Any) -> tuple[torch.nn.Linear, Count]:
    """Train two epochs, after which a signal arrives. When it leaves the ``with`` block, call ``change``."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = AveragedModel(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    count = Count()
    hooks = [*hooks, CheckpointSaverHook(folder, save_steps=100, listeners=[count], **saver)]
    state = {"average": average}
    old = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with MonitoredLoop(
            step, model, optimizer, hooks=hooks, checkpoint_dir=folder, state=state, signals=["SIGUSR1"]
        ) as loop:
            try:
                for epoch in loop.until_stop(range(2)):
                    for x in loop.until_stop([torch.ones(1, 2)] * 2):
                        loop.run(x)
                    if epoch == 1:
                        signal.raise_signal(signal.SIGUSR1)
            finally:  # as a context manager of the script does that puts something back
                if change is not None:
                    change(model, optimizer, average)
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert list_checkpoints(folder)[-1].finished == "data ended"
    return model, count


def test_a_state_that_was_saved_at_the_stop_is_only_marked(tmp_path: Path) -> None:
    assert finish(tmp_path)[1].steps == [0, 4]


def test_random_numbers_that_the_script_draws_after_the_stop_do_not_count(tmp_path: Path) -> None:
    assert finish(tmp_path, lambda *_: torch.rand(3))[1].steps == [0, 4]


CHANGES: dict[str, Change] = {
    "a weight, through .data": lambda model, optimizer, average: model.weight.data.add_(1),
    "a weight": lambda model, optimizer, average: torch.nn.init.zeros_(model.weight),
    "the optimizer": lambda model, optimizer, average: optimizer.param_groups[0].update(lr=0.5),
    "momentum, through .data": lambda model, optimizer, average: [
        each["momentum_buffer"].data.mul_(2) for each in optimizer.state.values()
    ],
    "an average": lambda model, optimizer, average: average.update_parameters(model),
}


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_a_state_that_the_script_changes_after_the_stop_is_saved(what: str, async_save: bool, tmp_path: Path) -> None:
    model, count = finish(tmp_path, CHANGES[what], async_save=async_save)
    assert count.steps == [0, 4, 4]
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    loaded = torch.nn.Linear(2, 1)
    load_weights(newest, loaded)
    assert torch.equal(loaded.weight, model.weight)


def test_what_a_hook_evaluates_at_the_end_is_saved(tmp_path: Path) -> None:
    def evaluation() -> EvaluationHook:
        return EvaluationHook(lambda global_step: {"a": global_step}, at_end=True)

    assert finish(tmp_path, hooks=[evaluation()])[1].steps == [0, 4, 4]
    again = evaluation()
    saver = Saver(strict=False)
    with MonitoredLoop(
        lambda: 0, torch.nn.Linear(2, 1), hooks=[again], checkpoint_dir=tmp_path, scaffold=Scaffold(saver=saver)
    ) as loop:
        assert loop.global_step == 4
        assert again.values == {"a": 4.0}


def test_a_saver_that_cannot_mark_saves_again(tmp_path: Path) -> None:
    class Plain:
        def __init__(self) -> None:
            self.saver: Saver = Saver()
            self.steps: list[int] = []

        def save(self, session: Any, path: str, global_step: int) -> str:
            self.steps.append(global_step)
            return self.saver.save(session, path, global_step)

    plain = Plain()
    finish(tmp_path, saver=plain)
    assert plain.steps == [0, 4, 4]


def test_a_save_that_cannot_be_marked_reads_no_state_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(saving, "digest_of_state", lambda training: read.append(1))
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1), StopAtStepHook(last_step=3)]
    with MonitoredLoop(lambda x: 0.5, torch.nn.Linear(1, 1), hooks=hooks, checkpoint_dir=tmp_path) as loop:
        for number in loop.until_stop(range(5)):
            loop.run(number)
    assert read == []


class Draws:
    def state_dict(self) -> dict[str, float]:
        return {"drawn": torch.rand(()).item()}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_the_digest_draws_no_random_number(tmp_path: Path) -> None:
    with MonitoredLoop(lambda: 0.5, torch.nn.Linear(1, 1), state={"draws": Draws()}) as loop:
        torch.manual_seed(0)
        first = digest_of_state(loop.session)
        assert first == digest_of_state(loop.session)
        drawn = torch.rand(())
        torch.manual_seed(0)
        assert torch.equal(drawn, torch.rand(()))


def test_a_part_without_a_digest_is_taken_for_a_changed_one(tmp_path: Path) -> None:
    class Fails(Draws):
        def state_dict(self) -> dict[str, float]:
            raise RuntimeError("not now")

    with MonitoredLoop(lambda: 0.5, torch.nn.Linear(1, 1), state={"fails": Fails()}) as loop:
        assert digest_of_state(loop.session) is None


def test_several_ranks_gather_once_for_a_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    gather = LoopRanks.gather

    def recorded(ranks: LoopRanks, value: Any, purpose: str = "", **options: Any) -> list[Any]:
        if ranks.rank == 0:
            asked.append(purpose)
        return gather(ranks, value, purpose, **options)

    monkeypatch.setattr(LoopRanks, "gather", recorded)

    def main(ranks: ThreadRanks, hub: Hub) -> None:
        listeners = [Count()] if ranks.rank else []
        hooks = [
            CheckpointSaverHook(tmp_path, every_n_steps=2, async_save="skip", saver=Saver(), listeners=listeners),
            CheckpointSaverHook(tmp_path, every_n_steps=3, saver=Saver()),
        ]
        with MonitoredLoop(
            lambda: hub.gather("step", ranks.rank, 0), hooks=hooks, checkpoint_dir=tmp_path, ranks=ranks
        ) as loop:
            for _ in loop.until_stop(range(6)):
                loop.run()

    assert in_threads(2, main) == [None, None]
    assert not {"whether a checkpoint is being written", "the listeners of a saver"} & {*asked}
    # Two at the creation, five that came due, at steps 2, 3, 4, 6 and 6, and two at the end.
    assert asked.count("a checkpoint") == 9


def test_a_save_that_is_due_where_the_script_passes_over_its_loop_is_made_at_the_end_of_the_item(
    tmp_path: Path,
) -> None:
    def looped() -> MonitoredLoop[Any]:
        saver = CheckpointSaverHook(tmp_path, every_n_steps=2)
        return MonitoredLoop(lambda: 0.5, torch.nn.Linear(1, 1), hooks=[saver], checkpoint_dir=tmp_path)

    def interrupted(loop: MonitoredLoop[Any]) -> None:
        for _ in loop.until_stop(range(2)):
            for batch in loop.until_stop(range(4)):
                loop.run()
                if batch == 2:
                    raise KeyError

    with pytest.raises(KeyError), looped() as loop:
        interrupted(loop)
    with looped() as loop:
        assert loop.global_step == 2
        for _ in loop.until_stop(range(1)):
            for _ in range(3):  # without until_stop: due at step 4, and the loop of the checkpoint has not begun
                loop.run()
    assert [each.step for each in list_checkpoints(tmp_path)] == [0, 2, 5]

"""What a resumed process repeats on its way to the item that was interrupted, and what the log says of the rest."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchhooks import (
    CheckpointError,
    CheckpointSaverHook,
    MonitoredLoop,
    Saver,
    Scaffold,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
    Variables,
)
from torchhooks.common.digests import TooManyValuesError, digest
from torchhooks.common.files import Disk
from torchhooks.common.trees import changes_in_place

Lines = list[tuple[str, str]]
Loop = MonitoredLoop[torch.Tensor]


class Job:
    """A tiny model, which is new in each process."""

    def __init__(self, folder: Path, stop: int = 100, saves: bool = True, **arguments: Any) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.folder, self.stop, self.saves = folder, stop, saves
        self.arguments = arguments

    def step(self, value: float = 1.0) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.tensor([value])).sum()
        loss.backward()
        self.optimizer.step()
        return loss

    @property
    def rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]  # type: ignore[no-any-return]

    @contextmanager
    def loop(self) -> Iterator[Loop]:
        hooks: list[SessionRunHook] = [StopAtStepHook(last_step=self.stop)]
        if self.saves:
            hooks.append(CheckpointSaverHook(self.folder, save_steps=1))
        state = {"scheduler": self.scheduler}
        with MonitoredLoop(
            self.step,
            self.model,
            self.optimizer,
            hooks=hooks,
            state=state,
            checkpoint_dir=self.folder,
            **self.arguments,
        ) as loop:
            yield loop


def epochs(job: Job, loop: Loop, at_start: Callable[[], object]) -> None:
    """Train three epochs of two batches, with something to do at the start of each but the first."""
    for epoch in loop.until_stop(range(3)):
        if epoch:
            at_start()
        for value in loop.until_stop([1.0, 2.0]):
            loop.run(value)


def test_what_the_start_of_an_epoch_changes_is_undone_when_it_is_repeated(tmp_path: Path, lines: Lines) -> None:
    job = Job(tmp_path, stop=3)
    with job.loop() as loop:
        epochs(job, loop, job.scheduler.step)
    job = Job(tmp_path)
    with job.loop() as loop:
        epochs(job, loop, job.scheduler.step)
    assert job.rate == 0.25
    assert [line for level, line in lines if level == "WARNING"] == []


def test_what_the_script_sets_before_the_data_is_kept(tmp_path: Path, lines: Lines) -> None:
    job = Job(tmp_path, stop=3)
    with job.loop() as loop:
        epochs(job, loop, lambda: None)
    job = Job(tmp_path)
    with job.loop() as loop:
        job.optimizer.param_groups[0]["lr"] = 0.125
        epochs(job, loop, lambda: None)
        assert job.rate == 0.125
    kept = "the script changed optimizer after the checkpoint was restored: that is kept"
    assert [text for _, text in lines if "is kept" in text] == [kept]


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_tensor_and_an_entry_that_the_script_sets_before_the_data_are_kept(tmp_path: Path) -> None:
    """The rest of the same parts is loaded again: the rate, and the weight."""

    def spoil() -> None:
        job.model.weight.data.fill_(9.0)
        job.scheduler.step()

    job = Job(tmp_path, stop=3)
    with job.loop() as loop:
        epochs(job, loop, lambda: None)
    weight = job.model.weight.item()
    job = Job(tmp_path, stop=4)
    with job.loop() as loop:
        with torch.no_grad():
            job.model.bias.fill_(5.0)
        job.scheduler.gamma = 0.75
        for _ in loop.until_stop(range(3)):
            spoil()
            for _ in loop.until_stop([1.0, 2.0]):
                assert (job.model.weight.item(), job.model.bias.item(), job.rate) == (weight, 5.0, 1.0)
                assert job.scheduler.gamma == 0.75
                loop.run()


class Memory:
    """An object of the script whose tensor shares the memory of an array, and which draws nothing from torch."""

    def __init__(self) -> None:
        self.array = np.zeros(5000)  # of which repr() shows six numbers
        self.seen = {3}

    def state_dict(self) -> dict[str, Any]:
        return {"tables": [torch.from_numpy(self.array)], "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.array[:] = state["tables"][0].numpy()
        self.seen = set(state["seen"])


class Uncounted(Job):
    """A job with a state that can be changed without a change of torch's count, ``Tensor._version``."""

    def __init__(self, folder: Path, stop: int = 100) -> None:
        self.memory, self.variables = Memory(), Variables(table=torch.zeros(3, 3), best=0.5)
        super().__init__(folder, stop)
        self.model.norm = torch.nn.BatchNorm1d(3)
        self.model.sparse = torch.nn.Parameter(torch.eye(3).to_sparse())
        self.optimizer = torch.optim.SGD([self.model.weight, self.model.bias], lr=0.0, momentum=0.5)

    @contextmanager
    def loop(self) -> Iterator[Loop]:
        hooks = [StopAtStepHook(last_step=self.stop), CheckpointSaverHook(self.folder, save_steps=1)]
        state: dict[str, Any] = {"memory": self.memory, "variables": self.variables}
        with MonitoredLoop(
            self.step, self.model, self.optimizer, hooks=hooks, state=state, checkpoint_dir=self.folder
        ) as loop:
            yield loop

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            "parameter": self.model.weight,
            "buffer": self.model.norm.running_mean,  # type: ignore[dict-item, union-attr]
            "sparse": self.model.sparse,  # type: ignore[dict-item]
            "momentum": self.optimizer.state[self.model.weight]["momentum_buffer"],
            "array": torch.from_numpy(self.memory.array),
            "variable": self.variables.table,
        }


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the elements that has a count of changes of its own."""
    data = tensor.data
    return data.values() if data.layout is torch.sparse_coo else data


def scale(tensor: torch.Tensor) -> None:
    values_of(tensor).mul_(2)
    values_of(tensor).add_(1)


def change_one(tensor: torch.Tensor) -> None:
    values_of(tensor).view(-1)[values_of(tensor).numel() // 2] += 1


def change_sign(tensor: torch.Tensor) -> None:
    """Also that of zeros, which are equal then."""
    values_of(tensor).neg_()


@pytest.mark.parametrize("change", [scale, change_one, change_sign])
def test_what_the_script_sets_before_the_data_is_kept_if_torch_does_not_count_it_as_a_change(
    change: Callable[[torch.Tensor], None], tmp_path: Path, lines: Lines
) -> None:
    job = Uncounted(tmp_path / "run", stop=3)
    with job.loop() as loop:
        epochs(job, loop, bool)
    for name in job.tensors():
        shutil.copytree(tmp_path / "run", tmp_path / name)
        job = Uncounted(tmp_path / name, stop=4)
        with job.loop() as loop:
            wanted = {each: digest(value.detach()) for each, value in job.tensors().items()}
            count = changes_in_place(job.tensors()[name])
            change(job.tensors()[name])
            assert name == "array" or changes_in_place(job.tensors()[name]) == count
            wanted[name] = digest(job.tensors()[name].detach())
            for _ in loop.until_stop(range(3)):
                for tensor in job.tensors().values():  # repeated: undone in all but the one
                    scale(tensor)
                for _ in loop.until_stop([1.0, 2.0]):
                    assert {each: digest(value.detach()) for each, value in job.tensors().items()} == wanted
                    loop.run()
    kept = [text.split()[3] for _, text in lines if "is kept" in text]
    assert kept == ["model", "model", "model", "optimizer", "memory", "variables"]


def test_a_state_of_too_many_values_for_a_digest_is_kept_as_it_is_before_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(values: Iterable[object]) -> list[str]:
        raise TooManyValuesError(f"{len([*values])} leaves")

    job = Uncounted(tmp_path, stop=3)
    with job.loop() as loop:
        epochs(job, loop, bool)
    monkeypatch.setattr("torchhooks.checkpoints.restoring.digests", refuse)
    job = Uncounted(tmp_path, stop=4)
    with job.loop() as loop:
        job.memory.seen.add(4)
        epochs(job, loop, job.memory.seen.clear)
        assert job.memory.seen == {3, 4}


@pytest.mark.parametrize("saves", [True, False])  # a saver writes a checkpoint with the part when the loop is created
def test_a_part_that_the_checkpoint_lacks_keeps_what_the_script_has_set(tmp_path: Path, saves: bool) -> None:
    job = Job(tmp_path, stop=3)
    with job.loop() as loop:
        epochs(job, loop, bool)
    weight = job.model.weight.item()
    job = Job(tmp_path, stop=4, saves=saves, scaffold=Scaffold(saver=Saver(strict=False)))
    job.model.head = torch.nn.Linear(1, 1)
    with job.loop() as loop:
        torch.nn.init.constant_(job.model.head.weight, 7.0)
        bias = job.model.head.bias.item()
        epochs(job, loop, lambda: torch.nn.init.zeros_(job.model.weight))
    head = job.model.head
    assert (head.weight.item(), head.bias.item()) == (7.0, bias)
    assert job.model.weight.item() == pytest.approx(weight - 2.0)


def test_a_group_of_the_optimizer_that_the_script_holds_is_the_one_that_trains(tmp_path: Path) -> None:
    job = Job(tmp_path, stop=3)
    with job.loop() as loop:
        epochs(job, loop, lambda: None)
    job = Job(tmp_path, stop=4)
    (group,) = job.optimizer.param_groups
    with job.loop() as loop:
        epochs(job, loop, lambda: None)
        assert job.optimizer.param_groups[0] is group


def test_gradients_that_the_start_of_an_epoch_drops_are_restored_again(tmp_path: Path) -> None:
    grads = []

    class Accumulating(Job):
        def step(self, value: float = 1.0) -> torch.Tensor:
            loss = self.model(torch.tensor([value])).sum()
            loss.backward()
            assert self.model.weight.grad is not None
            grads.append(self.model.weight.grad.item())
            return loss  # type: ignore[no-any-return]

    for stop in (3, 100):
        job = Accumulating(tmp_path, stop)
        with job.loop() as loop:
            epochs(job, loop, job.optimizer.zero_grad)
    assert grads == [1.0, 3.0, 1.0, 3.0, 1.0, 3.0]


def test_runs_before_the_inner_loop_are_undone_too(tmp_path: Path) -> None:
    def warm_up() -> None:
        job.scheduler.step()
        loop.run(0.5)

    job = Job(tmp_path, stop=4)
    with job.loop() as loop:
        epochs(job, loop, warm_up)
    job = Job(tmp_path)
    with job.loop() as loop:
        epochs(job, loop, warm_up)
    assert job.rate == 0.25
    assert loop.global_step == 8


def test_a_checkpoint_that_somebody_removes_meanwhile_is_an_error(tmp_path: Path) -> None:
    def remove() -> None:
        job.scheduler.step()
        for path in tmp_path.glob("model.ckpt*"):
            shutil.rmtree(path)

    job = Job(tmp_path, stop=3)
    with job.loop() as loop:
        epochs(job, loop, job.scheduler.step)
    job = Job(tmp_path, stop=4)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-3"), job.loop() as loop:
        epochs(job, loop, remove)


def test_a_first_save_in_the_background_that_replaces_the_checkpoint_is_waited_for(tmp_path: Path) -> None:
    made, replaced, waited = [], [], threading.Event()

    class Waited(Saver):
        def wait(self) -> None:
            waited.set()
            super().wait()

    class Replacing(Disk):
        def rename(self, path: str, new_path: str) -> None:
            super().rename(path, new_path)
            if new_path.endswith(".old"):  # now there is no checkpoint
                assert waited.wait(60)
                replaced.append(Path(path).name)

    for stop in (StopAtStepHook(2), None):
        saver = Waited(async_save=True)
        saver.disk = Disk() if stop else Replacing()
        waited.clear()
        hooks = [CheckpointSaverHook(tmp_path, save_steps=99, saver=saver), *([stop] if stop else [])]
        with MonitoredLoop(lambda: None, hooks=hooks, checkpoint_dir=tmp_path) as loop:
            for _ in loop.until_stop(range(1)):
                for item in loop.until_stop(range(4)):
                    loop.run()
                    made.append(item)
    assert (made, replaced) == ([0, 1, 2, 3], ["model.ckpt-2"])


def test_a_change_of_a_tensor_that_torch_does_not_count_is_undone(tmp_path: Path) -> None:
    """Of one element of many, which a checksum of a sample would miss."""

    class Large(Job):
        def __init__(self, folder: Path, stop: int = 100, **arguments: Any) -> None:
            super().__init__(folder, stop, **arguments)
            self.table = torch.nn.Embedding(10_000, 1)

        def step(self, value: float = 1.0) -> torch.Tensor:
            return self.table.weight[1]

        @contextmanager
        def loop(self) -> Iterator[Loop]:
            hooks = [StopAtStepHook(last_step=self.stop), CheckpointSaverHook(self.folder, save_steps=1)]
            with MonitoredLoop(self.step, self.table, hooks=hooks, checkpoint_dir=self.folder) as loop:
                yield loop

        def add(self) -> None:
            self.table.weight.data[1] += 1

    results = []
    for folder, stops in (("whole", [100]), ("resumed", [3, 100])):
        for stop in stops:
            torch.manual_seed(0)
            job = Large(tmp_path / folder, stop)
            with job.loop() as loop:
                epochs(job, loop, job.add)
        results.append(job.table.weight[1].item())
    assert results[0] == results[1]


def test_a_part_that_does_not_match_any_more_is_warned_of(tmp_path: Path, lines: Lines) -> None:
    def grow() -> None:
        job.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})

    job = Job(tmp_path, stop=3)
    with job.loop() as loop:
        epochs(job, loop, lambda: None)
    job = Job(tmp_path, stop=4)
    with job.loop() as loop:
        epochs(job, loop, grow)
    (warning,) = [text for level, text in lines if level == "WARNING" and "no longer matches" in text]
    assert "optimizer: has groups of [2, 1] parameters" in warning


class Asks(SessionRunHook):
    """Asks the loop to stop in one run."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.request_stop()


Body = Callable[[MonitoredLoop[Any], list[str]], object]


def breaks_at_the_end(loop: MonitoredLoop[Any], done: list[str]) -> None:
    for value in loop.until_stop([1.0, 2.0]):
        loop.run(value)
        done.append("all")
        if loop.should_stop():
            break


def returns_at_the_end(loop: MonitoredLoop[Any], done: list[str]) -> None:
    for value in loop.until_stop([1.0, 2.0]):
        loop.run(value)
        done.append("all")
        if done and (
            loop.should_stop()  # on a line of its own
        ):
            done.append("more")
            return


def breaks_at_the_end_of_a_branch(loop: MonitoredLoop[Any], done: list[str]) -> None:
    for value in loop.until_stop([1.0, 2.0]):
        loop.run(value)
        with loop.paused():
            if value > 1:
                done.append("another")
            elif is_enough(loop):
                break


def is_enough(loop: MonitoredLoop[Any]) -> bool:
    return loop.should_stop()


def breaks_in_the_middle(loop: MonitoredLoop[Any], done: list[str]) -> None:
    for value in loop.until_stop([1.0, 2.0]):
        loop.run(value)
        if loop.should_stop():
            break
        done.append("all")


def breaks_in_the_middle_of_a_branch(loop: MonitoredLoop[Any], done: list[str]) -> None:
    for value in loop.until_stop([1.0, 2.0]):
        loop.run(value)
        if value:
            if loop.should_stop():
                break
            done.append("all")


def asks_before_the_end(loop: MonitoredLoop[Any], done: list[str]) -> None:
    for value in loop.until_stop([1.0, 2.0]):
        loop.run(value)
        is_last = loop.should_stop()
        done.append("all")
        if is_last:
            break


def without_source(loop: MonitoredLoop[Any], done: list[str]) -> None:
    body = "for value in loop.until_stop([1.0, 2.0]):\n    loop.run(value)\n    if loop.should_stop():\n        break\n"
    exec(compile(body, "<unknown>", "exec"), {"loop": loop})


def goes_on(loop: MonitoredLoop[Any], done: list[str]) -> None:
    for value in loop.until_stop([1.0, 2.0]):
        loop.run(value)
        done.append(f"all: {loop.should_stop()}")


@pytest.mark.parametrize(
    ("body", "warns"),
    [
        (breaks_at_the_end, False),
        (returns_at_the_end, False),
        (breaks_at_the_end_of_a_branch, False),
        (breaks_in_the_middle, True),
        (breaks_in_the_middle_of_a_branch, True),
        (asks_before_the_end, True),  # what comes after should_stop() is missing in the checkpoint
        (without_source, True),
        (goes_on, False),
    ],
)
def test_a_break_at_should_stop_is_warned_of_unless_nothing_of_the_body_is_missing(
    lines: Lines, body: Body, warns: bool
) -> None:
    with MonitoredLoop(float, hooks=[Asks()]) as loop:
        body(loop, [])
    warnings = [text for level, text in lines if level == "WARNING"]
    assert [text[:69] for text in warnings] == warns * [
        "the body left until_stop because should_stop() was true after run 1. "
    ]


def test_a_break_for_another_reason_is_not(lines: Lines) -> None:
    with MonitoredLoop(float, hooks=[Asks()]) as loop:
        for value in loop.until_stop([1.0, 2.0]):
            loop.run(value)
            break
        assert loop.should_stop()
    assert [text for level, text in lines if level == "WARNING"] == []


def test_a_checkpoint_without_a_position_in_the_data_is_reported_but_not_in_a_recovery(
    tmp_path: Path, lines: Lines
) -> None:
    failed: list[int] = []

    class FailsOnce(Job):
        def step(self, value: float = 1.0) -> torch.Tensor:
            if not failed:
                failed.append(1)
                raise ConnectionError("lost")
            return super().step(value)

    for stop in (2, 4):
        lines.clear()
        job = FailsOnce(tmp_path, stop=stop, recoverable_errors=(ConnectionError,))
        with job.loop() as loop:
            for value in [1.0, 2.0, 3.0]:
                if not loop.should_stop():
                    loop.run(value)
            reported = [text for _, text in lines if "no position" in text]
            assert len(reported) == (stop == 4)
    path = tmp_path / "model.ckpt-2"
    assert reported == [f"{path} has no position in the data: what is not in the loop's state starts over"]


def test_where_the_data_continue_is_logged_once(tmp_path: Path, lines: Lines) -> None:
    job = Job(tmp_path, stop=3)
    with job.loop() as loop:
        epochs(job, loop, lambda: None)
    lines.clear()
    job = Job(tmp_path)
    with job.loop() as loop:
        epochs(job, loop, lambda: None)
    (text,) = [text for _, text in lines if "continues" in text]
    assert text.startswith("until_stop's list continues at item 1;")


@pytest.mark.parametrize("nested", [False, True])
def test_a_finished_loop_that_the_script_skips_by_hand_is_reported(nested: bool, tmp_path: Path, lines: Lines) -> None:
    """The second loop counts as the first, so it yields nothing."""
    for stop in (4, 5):
        lines.clear()
        job = Job(tmp_path, stop=stop)
        with job.loop() as loop:
            for _ in loop.until_stop(range(2) if nested else [0]):
                if loop.global_step < 3:
                    for value in loop.until_stop([1.0, 2.0, 3.0]):
                        loop.run(value)
                for value in loop.until_stop([4.0, 5.0]):
                    loop.run(value)
    assert [text for level, text in lines if level == "WARNING" and "until_stop" in text] == [
        "this process has passed over the until_stop in which the checkpoint was saved. Loops are told apart by their "
        "order: begin the same loops in every process. A loop that had finished yields nothing, so do not skip it by "
        "hand. To begin again with the data, use until_stop(..., resume=False); for a new training run, give another "
        "checkpoint_dir"
    ]


def test_a_run_on_the_way_to_the_loop_of_the_checkpoint_saves_nothing_until_that_is_passed_over(
    tmp_path: Path, lines: Lines
) -> None:
    job = Job(tmp_path, stop=3)
    with job.loop() as loop:
        epochs(job, loop, lambda: None)
    before = sorted(path.name for path in tmp_path.glob("model.ckpt-*"))
    lines.clear()
    with Job(tmp_path).loop() as loop:
        for _ in loop.until_stop(range(3)):
            break
        loop.run(1.0)
        assert sorted(path.name for path in tmp_path.glob("model.ckpt-*")) == before
        for value in loop.until_stop([4.0, 5.0]):
            loop.run(value)
    unsaved = "no checkpoint of step 4: the loop in which the restored one was saved has not begun"
    assert ("INFO", unsaved) in lines
    assert [text for level, text in lines if level == "WARNING" and "has passed over" in text]
    assert (tmp_path / "model.ckpt-6").exists()


def test_an_outer_loop_with_fewer_items_than_before_passes_over_the_loop_of_the_checkpoint(
    tmp_path: Path, lines: Lines
) -> None:
    class Epochs:
        def __init__(self, number: int) -> None:
            self.number = number

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.number))

    with Job(tmp_path, stop=3).loop() as loop:
        for _ in loop.until_stop(Epochs(3)):
            for value in loop.until_stop([1.0, 2.0]):
                loop.run(value)
    lines.clear()
    with Job(tmp_path).loop() as loop:
        assert list(loop.until_stop(Epochs(1))) == []
        assert loop.session.position is not None
        assert not loop.session.position.is_repeating
    assert [text for level, text in lines if level == "WARNING" and "has passed over" in text]


def test_a_stop_before_the_loop_that_is_to_be_resumed_is_not_reported(tmp_path: Path, lines: Lines) -> None:
    for stops_between in (False, True):
        job = Job(tmp_path, stop=9 if stops_between else 4)
        with job.loop() as loop:
            for value in loop.until_stop([1.0, 2.0, 3.0]):
                loop.run(value)
            if stops_between:
                loop.request_stop()
            for value in loop.until_stop([4.0, 5.0]):
                loop.run(value)
    assert [text for level, text in lines if level == "WARNING"] == []


@contextmanager
def delivered() -> Iterator[None]:
    """Ignore the SIGTERM that a closed loop delivers again."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.filterwarnings("ignore:Detected call of")  # a schedule that steps before the first run
@pytest.mark.parametrize("where", ["start", "between"])
def test_what_the_body_does_before_a_loop_that_a_signal_cuts_short_is_undone(where: str, tmp_path: Path) -> None:
    """The signal comes in the code before an inner loop, and the checkpoint contains what that code changed."""
    rates, taken = [], []
    for stops in (True, False):
        job = Job(tmp_path, signals=["SIGTERM"])
        with delivered(), job.loop() as loop:
            for epoch in loop.until_stop(range(2)):
                for value in loop.until_stop([1.0, 2.0] if where == "between" else []):
                    taken.append(value)
                    loop.run(value)
                job.scheduler.step()
                if stops and epoch == 1:
                    signal.raise_signal(signal.SIGTERM)
                for value in loop.until_stop([3.0, 4.0]):
                    taken.append(value)
                    loop.run(value)
            rates.append(job.rate)
    assert rates[-1] == 0.25
    assert taken == ([1.0, 2.0, 3.0, 4.0] if where == "between" else [3.0, 4.0]) * 2


def test_an_epoch_that_the_script_skips_by_hand_does_not_take_the_next_one_with_it(
    tmp_path: Path, lines: Lines
) -> None:
    taken = []
    for stop in (2, 100):
        job = Job(tmp_path, stop=stop)
        with job.loop() as loop:
            for epoch in loop.until_stop(range(loop.global_step // 2, 2)):
                for value in loop.until_stop([1.0, 2.0]):
                    taken.append((epoch, value))
                    loop.run(value)
    assert taken == [(0, 1.0), (0, 2.0), (1, 1.0), (1, 2.0)]
    (warning,) = [text for level, text in lines if level == "WARNING"]
    assert warning.startswith("until_stop's range continues after the item")


def test_a_loop_that_was_left_in_the_run_of_a_stop_continues_and_says_so(tmp_path: Path, lines: Lines) -> None:
    taken = []
    for stop in (2, 100):
        job = Job(tmp_path, stop=stop)
        with job.loop() as loop:
            for value in loop.until_stop([1.0, 2.0, 3.0]):
                taken.append(value)
                loop.run(value)
                if loop.global_step == 2:
                    break
    assert taken == [1.0, 2.0, 3.0]
    (line,) = [text for level, text in lines if level == "WARNING"]
    assert line.startswith("until_stop's list continues at item 2. The script left it before in the run of a stop")

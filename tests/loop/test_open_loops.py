"""Two loops of one process that are open must not share a folder of checkpoints."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from torchhooks import CheckpointSaverHook, LifecycleError, MonitoredLoop, Saver, SessionRunHook

WAY_OUT = "Call close() of the first one before you create the second, also in a notebook, "
TWO = "or give them two folders"
NAMED = "give them two folders, or name the checkpoint to restore, such as model.ckpt-600 in it"


def loop_in(saves: Path | str | None, restores: Path | str | None, **arguments: Any) -> MonitoredLoop[None]:
    """Return a loop that saves in one folder, and restores from another."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(*errors: Exception) -> None:
        for error in errors:
            raise error
        optimizer.zero_grad()
        model(torch.ones(1)).sum().backward()
        optimizer.step()

    hooks = [] if saves is None else [CheckpointSaverHook(saves, every_n_steps=2)]
    return MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=restores, **arguments)


@pytest.mark.parametrize(
    ("first", "second", "does"),
    [
        (("a", "a"), ("a", "a"), "saves checkpoints there, and <...> would replace them by others"),
        (("a", None), ("a", None), "saves checkpoints there, and <...> would replace them by others"),
        (("a", "a"), (None, "a"), "saves checkpoints there, and <...> would restore them"),
        (("a", "a"), ("b", "a"), "saves checkpoints there, and <...> would restore them"),
        ((None, "a"), ("a", "a"), "restores checkpoints from there, and <...> would save others there"),
        (("b", "a"), ("a", "b"), "saves checkpoints there, and <...> would restore them"),
    ],
)
def test_two_open_loops_with_one_folder_are_an_error_that_names_both(
    first: tuple[str, str], second: tuple[str, str], does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with loop_in(*first) as loop:
        loop.run()
        with pytest.raises(ValueError, match="is open and") as raised:
            loop_in(*second)
        loop.run()  # the first one is not disturbed
    folder, message = str(raised.value).split(": ", 1)
    assert os.path.basename(folder) in ("a", "b")
    assert message.startswith("<MonitoredLoop at step 1, running")
    shortened = re.sub(r"and <MonitoredLoop at step 0[^>]*>", "and <...>", message)
    assert shortened.endswith(f"is open and {does}. {WAY_OUT}{NAMED if 'would restore' in does else TWO}")
    loop_in(*second).close()


@pytest.mark.parametrize(
    ("first", "second"),
    [((None, "a"), (None, "a")), (("a", "a"), ("b", "b")), (("a", "a"), (None, None)), (("a", "b"), (None, "b"))],
)
def test_loops_that_do_not_share_what_is_saved_may_be_open(
    first: tuple[str, str], second: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with loop_in(*first), loop_in(*second):
        pass


def test_a_chosen_checkpoint_may_be_restored_while_another_loop_saves(tmp_path: Path) -> None:
    with loop_in(tmp_path, tmp_path) as loop:
        loop.run()
        with loop_in(None, tmp_path / "model.ckpt-0") as other:
            assert other.global_step == 0
        with pytest.raises(ValueError, match="would replace them by others"):
            loop_in(tmp_path, tmp_path / "model.ckpt-0")


def test_one_folder_by_two_names_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with loop_in(tmp_path / "run", tmp_path / "run"):
        with pytest.raises(ValueError, match="is open and"):
            loop_in(tmp_path / "link", None)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match="is open and"):
            loop_in("run", "run")


@pytest.mark.parametrize("error", [None, KeyError(), KeyboardInterrupt()])
def test_a_loop_that_is_over_is_not_open(error: BaseException | None, tmp_path: Path) -> None:
    def train() -> None:
        with loop_in(tmp_path, tmp_path) as loop:
            loop.run()
            if error is not None:
                raise error

    if error is None:
        train()
    else:
        with pytest.raises(type(error)):
            train()
    loop_in(tmp_path, tmp_path).close()


def test_a_loop_whose_recovery_failed_is_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_in(tmp_path, tmp_path, recoverable_errors=[ConnectionError])
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "restore_latest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.run(ConnectionError())
    loop_in(tmp_path, tmp_path).close()
    with pytest.raises(LifecycleError, match="after a recovery that failed"):
        loop.run()
    loop.close()


def test_a_loop_whose_creation_failed_is_not_open(tmp_path: Path) -> None:
    class Failing(SessionRunHook):
        def begin(self) -> None:
            raise KeyError

    saver = CheckpointSaverHook(tmp_path, every_n_steps=1)
    with pytest.raises(KeyError):
        MonitoredLoop(float, hooks=[saver, Failing()], checkpoint_dir=tmp_path)
    MonitoredLoop(float, hooks=[saver], checkpoint_dir=tmp_path).close()


@pytest.mark.parametrize("unit", ["run", "optimizer_step"])
@pytest.mark.parametrize("iterates", [False, True])
@pytest.mark.parametrize("collects", [False, True])
def test_a_loop_that_nothing_refers_to_any_more_is_not_open(
    unit: str, iterates: bool, collects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchhooks.loop.monitored_loop._open", set())  # no line about them at the end of the process
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # which stays, as in another cell of a notebook
    gc.collect()
    if not collects:
        gc.disable()
    try:
        for _ in range(3):
            hooks = [CheckpointSaverHook(tmp_path, every_n_steps=2)]
            loop = MonitoredLoop(float, model, optimizer, hooks=hooks, checkpoint_dir=tmp_path, step_unit=unit)
            if iterates:
                next(loop.until_stop(range(3)))
            loop.run()
            del loop
    finally:
        gc.enable()


def test_a_variable_that_is_assigned_anew_refers_to_the_first_loop_meanwhile(tmp_path: Path) -> None:
    loop = loop_in(tmp_path, tmp_path)
    with pytest.raises(ValueError, match="is open and"):
        loop = loop_in(tmp_path, tmp_path)
    loop.close()
    loop = loop_in(tmp_path, tmp_path)
    loop.close()


def test_a_loop_of_another_thread_counts(tmp_path: Path) -> None:
    errors: list[str] = []

    def train() -> None:
        try:
            loop_in(tmp_path, tmp_path).close()
        except ValueError as error:
            errors.append(str(error))

    with loop_in(tmp_path, tmp_path):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert len(errors) == 1


def train_and_exit(folder: Path) -> None:
    loop_in(folder, folder).close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_none_of_the_loops_of_its_parent(tmp_path: Path) -> None:
    with loop_in(tmp_path, tmp_path):
        process = multiprocessing.get_context("fork").Process(target=train_and_exit, args=(tmp_path,))
        process.start()
        process.join()
    assert process.exitcode == 0

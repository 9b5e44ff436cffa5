"""The writer of a hook is opened with the loop, and flushed and closed with it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from support.events import curve, steps

from torchhooks import (
    CheckpointSaverHook,
    MonitoredLoop,
    SessionRunHook,
    StepCounterHook,
    SummarySaverHook,
    SummaryWriterCache,
)
from torchhooks.lifecycle.session import Session
from torchhooks.summary import histogram
from torchhooks.summary.writers import WriterTarget
from torchhooks.testing import RecordingWriter, trace


class Begun(Session):
    """A session in its first run."""

    def __init__(self, begun_at: int = 0, step: int = 1, restored: bool = False) -> None:
        super().__init__()
        self.global_step = begun_at
        self.loop_state.outputs, self.loop_state.global_step = None, step
        if restored:
            self.begin_with_checkpoint()


def opened(target: WriterTarget) -> Any:
    """Open ``target``, and return the one writer, without its adapter."""
    (writer,) = target.open()
    return getattr(writer, "writer", writer)


def test_there_is_no_writer_before_it_is_opened_and_a_close_is_harmless(tmp_path: Path) -> None:
    target = WriterTarget(tmp_path, None)
    target.close()
    assert target.writers == ()
    assert list(tmp_path.iterdir()) == []


def test_a_given_writer_is_the_writer_until_it_is_closed() -> None:
    writer = RecordingWriter()
    target = WriterTarget(None, writer)
    assert [*target.open()] == [*target.writers] == [writer]
    target.close()
    assert target.writers == ()


def test_the_writer_of_a_folder_comes_from_the_cache(tmp_path: Path) -> None:
    assert opened(WriterTarget(tmp_path, None)) is SummaryWriterCache.get(tmp_path)


def test_an_address_gets_the_writer_of_tensorboard_which_knows_stores() -> None:
    writer = SummaryWriterCache.get("memory://bucket/curves")
    writer.add_scalar("loss", 0.5, 3)
    SummaryWriterCache.clear()
    (file,) = fsspec.filesystem("memory").ls("/bucket/curves", detail=False)
    assert "tfevents" in file


def test_two_targets_with_one_folder_share_a_writer_and_a_file(tmp_path: Path) -> None:
    one, other = WriterTarget(tmp_path, None), WriterTarget(str(tmp_path), None)
    assert opened(one) is opened(other)
    one.close()
    other.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_target_without_a_place_has_no_writer() -> None:
    target = WriterTarget(None, None)
    assert target.open() == ()
    target.close()


def test_a_restored_session_without_a_place_to_write_needs_no_start() -> None:
    assert trace(StepCounterHook(1), losses=[0.5] * 2, start_step=7).steps == [8, 9]


def test_close_flushes_a_given_writer_once_and_leaves_it_open() -> None:
    writer = RecordingWriter()
    target = WriterTarget(None, writer)
    target.open()
    target.close()
    target.close()
    assert (writer.flushed, writer.closed) == (1, 0)


def test_close_closes_the_writer_of_a_folder_and_the_next_open_has_a_new_one(tmp_path: Path) -> None:
    target = WriterTarget(tmp_path, None)
    writer = opened(target)
    target.close()
    assert writer.all_writers is None
    assert opened(target) is not writer


def test_a_flush_that_fails_leaves_nothing_open() -> None:
    class Full(RecordingWriter):
        def flush(self) -> None:
            raise OSError("no space left")

    target = WriterTarget(None, Full())
    target.open()
    with pytest.raises(OSError, match="no space left"):
        target.close()
    assert target.writers == ()


def test_a_target_that_was_never_closed_is_forgotten_when_it_is_freed() -> None:
    writer = RecordingWriter()
    for _ in range(2):
        target = WriterTarget(None, writer, starts_session=True)
        target.open()
        target.session_created(Begun())
        target.start_session()
        del target
    assert writer.records == [("session_log", "START", 1)] * 2


@pytest.mark.parametrize(("begun_at", "step", "start"), [(0, 0, 0), (0, 1, 1), (0, 3, 1), (7, 7, 8), (7, 9, 8)])
def test_a_start_has_the_first_step_that_the_session_makes(begun_at: int, step: int, start: int) -> None:
    writer = RecordingWriter()
    target = WriterTarget(None, writer, starts_session=True)
    target.open()
    target.session_created(Begun(begun_at, step))
    target.start_session()
    assert writer.records == [("session_log", "START", start)]


def test_hooks_with_one_writer_have_one_start_before_the_first_point() -> None:
    writer = RecordingWriter()
    trace(*(SummarySaverHook(1, summary_writer=writer, summary_op={tag: "loss"}) for tag in "ab"), losses=[0.5])
    assert [kind for kind, *_ in writer.records] == ["session_log", "scalar", "scalar"]


def test_a_hook_whose_first_point_comes_later_voids_no_point_of_another() -> None:
    writer = RecordingWriter()
    late = SummarySaverHook(every_n_steps=3, summary_writer=writer, summary_op={"late": "loss"})
    trace(StepCounterHook(1, summary_writer=writer), late, losses=[0.5] * 3)
    assert [kind for kind, *_ in writer.records] == ["session_log", "scalar", "scalar", "scalar"]


def test_refuses_two_places_and_shows_them() -> None:
    with pytest.raises(ValueError, match=r"output_dir='d', summary_writer=5: give one, not both"):
        WriterTarget("d", 5)


def test_a_folder_in_place_of_a_writer_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"summary_writer='runs': must be a writer.*: for the folder .*, give output_dir="
    ):
        WriterTarget(None, "runs")


def test_a_writer_that_passes_every_call_on_gets_histograms_with_all_their_values() -> None:
    class Proxy:
        def __init__(self, writer: object) -> None:
            self.inner = writer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    writer = RecordingWriter()
    model = torch.nn.Linear(2, 1)
    hook = SummarySaverHook(1, summary_writer=Proxy(writer), summary_op=histogram("weights", "weight"))
    with MonitoredLoop(lambda: None, model, hooks=[hook]) as loop:
        loop.run()
    assert [kind for kind, *_ in writer.records][-1] == "histogram"


# -- one folder, several loops ----------------------------------------------------------------------------------------


def summaries(folder: object) -> SummarySaverHook:
    return SummarySaverHook(1, output_dir=folder, summary_op={"loss": "loss"})


def event_files(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if "tfevents" in name]


def inner_summaries(folder: Path) -> SummarySaverHook:
    return SummarySaverHook(1, output_dir=folder, summary_op={"inner": "loss"})


def inner_counter(folder: Path) -> StepCounterHook:
    return StepCounterHook(1, output_dir=folder)


@pytest.mark.parametrize("inner", [inner_summaries, inner_counter])
@pytest.mark.parametrize("start_step", [0, 1], ids=["from the beginning", "restored"])
def test_a_loop_between_two_runs_of_another_voids_none_of_its_points(
    inner: Callable[[Path], SessionRunHook], start_step: int, tmp_path: Path
) -> None:
    with MonitoredLoop(lambda: 0.5, hooks=[summaries(tmp_path)]) as outer:
        for _ in range(3):
            outer.run()
        trace(inner(tmp_path), losses=[0.25] * 2, start_step=start_step)
        outer.run()
    assert curve(tmp_path, "loss") == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert len(event_files(tmp_path)) == 1


def test_a_loop_within_the_first_run_of_another_voids_no_point_of_an_earlier_process(tmp_path: Path) -> None:
    trace(summaries(tmp_path), losses=[0.5] * 3)

    def step() -> float:
        trace(inner_summaries(tmp_path), losses=[0.25])
        return 0.75

    with MonitoredLoop(step, hooks=[summaries(tmp_path)]) as outer:
        outer.session.global_step = 2
        outer.run()
    # The outer loop still has its own START, which discards the point of step 3.
    assert curve(tmp_path, "loss") == [(1, 0.5), (2, 0.5), (3, 0.75)]


def test_a_loop_after_another_one_leaves_its_points(tmp_path: Path) -> None:
    for fold in range(3):
        losses = SummarySaverHook(1, output_dir=tmp_path, summary_op={f"fold{fold}": "loss"})
        trace(losses, StepCounterHook(1, output_dir=tmp_path), losses=[fold] * 3)
    for fold in range(3):
        assert curve(tmp_path, f"fold{fold}") == [(1, fold), (2, fold), (3, fold)]
    assert [step for step, _ in curve(tmp_path, "global_step/sec")] == [2, 3] * 3


def test_a_loop_after_one_that_wrote_nothing_has_a_start(tmp_path: Path) -> None:
    trace(summaries(tmp_path), losses=[0.5] * 3)
    script = (
        "from torchhooks import SummarySaverHook\n"
        "from torchhooks.testing import trace\n"
        "for losses in ([], [0.25]):\n"
        f"    trace(SummarySaverHook(1, output_dir={str(tmp_path)!r}, summary_op={{'loss': 'loss'}}), losses=losses)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert curve(tmp_path, "loss") == [(1, 0.25)]


def test_a_loop_in_a_forked_process_has_a_start(tmp_path: Path) -> None:
    trace(summaries(tmp_path), losses=[0.5] * 3)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=lambda: trace(summaries(tmp_path), losses=[0.25]))
    process.start()
    process.join()
    assert curve(tmp_path, "loss") == [(1, 0.25)]


def test_a_loop_that_is_restored_in_the_same_process_voids_what_it_repeats(tmp_path: Path) -> None:
    def train(loss: float, last_step: int) -> None:
        hooks: list[SessionRunHook] = [summaries(tmp_path), CheckpointSaverHook(every_n_steps=2)]
        with MonitoredLoop(lambda: loss, hooks=hooks, checkpoint_dir=tmp_path) as loop:
            while loop.global_step < last_step:
                loop.run()
            raise KeyboardInterrupt

    for loss, last_step in ((0.5, 3), (0.25, 4)):
        with pytest.raises(KeyboardInterrupt):
            train(loss, last_step)
    assert curve(tmp_path, "loss") == [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25)]


def test_loops_in_several_threads_write_one_file_and_lose_no_point(tmp_path: Path) -> None:
    def train(tag: str) -> None:
        hook = SummarySaverHook(1, output_dir=tmp_path, summary_op={tag: "loss"})
        with MonitoredLoop(lambda: 0.5, hooks=[hook]) as loop:
            loop.run()
            all_write.wait(60)
            loop.run()
            if tag == "last":
                assert others_are_closed.acquire(timeout=60)
                assert others_are_closed.acquire(timeout=60)
            loop.run()
        others_are_closed.release()

    tags = ["a", "b", "last"]
    all_write, others_are_closed = threading.Barrier(3), threading.Semaphore(0)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, tags))
    assert {tag: steps(tmp_path, tag) for tag in tags} == {tag: [1, 2, 3] for tag in tags}
    assert len(event_files(tmp_path)) == 1


def test_a_loop_of_another_thread_writes_no_point_before_its_start_is_written() -> None:
    class Slow(RecordingWriter):
        def add_session_log(self, status: Any, step: int, checkpoint_path: Any = None) -> None:
            thread.start()
            thread.join(0.1)  # it is waiting for the START
            super().add_session_log(status, step)

    def first_run() -> None:
        other.start_session()
        writer.add_scalar("loss", 0.5, 1)

    writer, thread = Slow(), threading.Thread(target=first_run)
    mine, other = (WriterTarget(None, writer, starts_session=True) for _ in range(2))
    for target in (mine, other):
        target.open()
        target.session_created(Begun())
    mine.start_session()
    thread.join()
    assert [kind for kind, *_ in writer.records] == ["session_log", "scalar"]


def test_the_last_target_of_a_folder_closes_its_writer(tmp_path: Path) -> None:
    one, other = WriterTarget(tmp_path, None), WriterTarget(tmp_path, None)
    writer = opened(one)
    other.open()
    one.close()
    assert writer.all_writers is not None
    other.close()
    assert writer.all_writers is None


def test_the_writer_of_a_folder_stays_open_for_a_hook_that_was_given_it(tmp_path: Path) -> None:
    opening, given = WriterTarget(tmp_path, None), WriterTarget(None, SummaryWriterCache.get(tmp_path))
    writer = opened(opening)
    assert opened(given) is writer
    opening.close()
    assert writer.all_writers is not None
    given.close()
    assert writer.all_writers is None


def test_the_writer_of_a_folder_is_closed_even_if_another_writer_there_cannot_be_flushed(
    tmp_path: Path,
) -> None:
    class Full(RecordingWriter):
        log_dir = str(tmp_path)

        def flush(self) -> None:
            raise OSError("no space left")

    opening, full = WriterTarget(tmp_path, None), WriterTarget(None, Full())
    writer = opened(opening)
    full.open()
    opening.close()
    with pytest.raises(OSError, match="no space left"):
        full.close()
    assert writer.all_writers is None


def test_a_folder_that_is_named_by_a_link_and_by_its_path_has_one_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    names: list[object] = [folder, f"{folder}/", link, f"{link}/", "link", "folder/../link", os.fsencode(folder)]
    targets = [WriterTarget(name, None) for name in names]
    assert len({opened(target) for target in targets}) == 1
    for target in targets:
        target.close()
    assert len(event_files(folder)) == 1


def test_writers_that_name_one_folder_in_two_ways_are_at_one_place(tmp_path: Path) -> None:
    class Named(RecordingWriter):
        def __init__(self, log_dir: Path) -> None:
            super().__init__()
            self.log_dir = log_dir

    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    writers = [Named(name) for name in (tmp_path, link)]
    targets = [WriterTarget(None, writer, starts_session=True) for writer in writers]
    for target in targets:
        target.open()
        target.session_created(Begun())
    for target in targets:
        target.start_session()
    assert [len(writer.records) for writer in writers] == [1, 0]


def test_a_target_closes_the_writer_that_it_opened_after_the_working_directory_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = WriterTarget("runs", None)
    writer = opened(target)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    target.close()
    assert writer.all_writers is None
    assert os.listdir(tmp_path / "elsewhere") == []

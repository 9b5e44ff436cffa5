"""The rules of a copy, each against a folder and against an S3 server behind a proxy that fails in many ways."""

from __future__ import annotations

import errno
import html
import json
import os
import re
import shutil
import socket
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec.config
import pytest
from support import proxy as proxies
from support.copies import FolderPlace, S3Place, new_copy, saving, whole
from support.schemas import answer

import torchhooks.tools.mirror.copy
import torchhooks.tools.mirror.layout
from torchhooks import CheckpointError, list_checkpoints
from torchhooks.__main__ import main
from torchhooks.checkpoints.folder import Folder, Retention, encoded, file_sums
from torchhooks.common.files import Disk
from torchhooks.summary.tensorboard import DirectSummaryWriter
from torchhooks.tools.mirror.copy import OtherJobError
from torchhooks.tools.mirror.store import Secrets, Store, StoreError
from torchhooks.tools.run_record import Record

pytest_plugins = ["support.copy_fixtures"]
Lines = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchhooks.tools.mirror.layout, "PAUSES_SECS", (0.0, 0.0))


def warnings_in(lines: Lines) -> list[str]:
    return [text for level, text in lines if level == "WARNING"]


# -- 1: what is a copy ------------------------------------------------------------------------------------------------


def test_a_new_copy_is_announced_and_its_marker_is_written_first(
    place: FolderPlace, tmp_path: Path, lines: Lines
) -> None:
    copy = new_copy(tmp_path / "run", place)
    assert ("INFO", f"{place.url} has nothing: a new copy begins there") in lines
    assert place.names() == ["mirror.json"]
    assert json.loads(place.read("mirror.json"))["run"] is None  # before the first checkpoint
    saving(tmp_path / "run")(3)
    assert copy.push_checkpoints() == ["model.ckpt-3"]
    assert json.loads(place.read("mirror.json"))["run"] == (tmp_path / "run/.mirror/run-id").read_text()
    lines.clear()
    new_copy(tmp_path / "run", place)
    assert lines == []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("other/data.bin", b"data", "has objects, such as other/data.bin, but no mirror.json"),
        ("mirror.json", b"<html>Please log in", r"is no copy of a training run: its mirror.json begins with b'<html>"),
        ("mirror.json", b'{"format": 2, "run": "a", "session": "b"}', "has format 2, and this version .* knows 1"),
    ],
)
def test_what_is_no_copy_is_an_error(place: FolderPlace, tmp_path: Path, name: str, data: bytes, message: str) -> None:
    place.write(name, data)
    with pytest.raises(CheckpointError, match=message):
        new_copy(tmp_path / "run", place)
    assert place.names() == [name]


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_place_that_does_not_exist_is_an_error(kind: str, s3: S3Place, tmp_path: Path) -> None:
    place = FolderPlace(tmp_path / "unmounted/store")
    if kind == "s3":
        place.url, place.options = "s3://no-such-bucket/run", s3.options
    with pytest.raises(CheckpointError, match="the bucket, or the folder above, does not exist"):
        new_copy(tmp_path / "run", place)
    assert not (tmp_path / "unmounted").exists()


def test_a_list_that_lacks_what_was_just_written_is_an_error(s3: S3Place, tmp_path: Path) -> None:
    """An empty list, or a page of a network that asks for a password, is not the list of an empty copy."""
    saving(tmp_path / "run")(3)
    new_copy(tmp_path / "run", s3).push_checkpoints()
    s3.fault("GET", "list-type", proxies.html)
    with pytest.raises(StoreError):
        new_copy(tmp_path / "new", s3)
    assert whole(s3) == ["model.ckpt-3"]


# -- 2: what cannot be read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("manifest.json", lambda data: data[: len(data) // 2]),
        ("manifest.json", lambda data: b"<html>"),
        ("manifest.json", lambda data: encoded({**json.loads(data), "format": 99})),
        ("manifest.json", lambda data: encoded({**json.loads(data), "name": "model.ckpt-9"})),
        ("state.pt", lambda data: data[: len(data) // 2]),
        ("state.pt", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    ],
)
def test_the_newest_that_can_be_read_is_used_and_what_cannot_be_is_named_and_stays(
    place: FolderPlace, tmp_path: Path, lines: Lines, file: str, damage: Callable[[bytes], bytes]
) -> None:
    save = saving(tmp_path / "run")
    copy = new_copy(tmp_path / "run", place)
    for step in (1, 2, 3):
        save(step)
        copy.push_checkpoints()
    damaged = [name for name in place.names() if re.match(rf"model.ckpt-[23]~.*/{file}", name)]
    for name in damaged:
        place.write(name, damage(place.read(name)))
    lines.clear()
    new = new_copy(tmp_path / "new", place)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "new")] == [1]
    named = [text for text in warnings_in(lines) if "in the copy cannot be read" in text]
    assert [text.partition("~")[0] for text in named] == ["model.ckpt-3", "model.ckpt-2"]
    save = saving(tmp_path / "new", max_to_keep=1)
    for step in (4, 5, 6):
        save(step)
        new.push_checkpoints()
    assert set(damaged) <= set(place.names())
    assert [name for name in whole(place) if name[-1] not in "23"] == ["model.ckpt-6"]


def test_a_copy_with_nothing_but_unreadable_checkpoints_starts_nothing_over(
    place: FolderPlace, tmp_path: Path, lines: Lines
) -> None:
    saving(tmp_path / "run")(3)
    new_copy(tmp_path / "run", place).push_checkpoints()
    [name] = [name for name in place.names() if name.endswith("state.pt")]
    place.write(name, b"cut")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* can be read; the log says why"):
        new_copy(tmp_path / "new", place)
    assert len(whole(place)) == 1
    new_copy(tmp_path / "run", place)  # has one of its own
    assert len(warnings_in(lines)) == 1


@pytest.mark.parametrize("fault", [proxies.unavailable, proxies.dropped, proxies.html, proxies.halved])
def test_one_bad_answer_costs_no_checkpoint(s3: S3Place, tmp_path: Path, lines: Lines, fault: proxies.Fault) -> None:
    saving(tmp_path / "run")(3)
    new_copy(tmp_path / "run", s3).push_checkpoints()
    for part in ("mirror.json", "manifest.json", "state.pt"):
        s3.fault("GET", part, fault, times=1)
        if part == "mirror.json" and fault in (proxies.html, proxies.halved):
            with pytest.raises(CheckpointError, match="is no copy"):
                new_copy(tmp_path / "new", s3)
        else:
            new_copy(tmp_path / "new", s3)
            assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "new")] == [3]
            shutil.rmtree(tmp_path / "new")
    assert warnings_in(lines) == []


def test_only_what_enough_newer_ones_replace_is_removed(place: FolderPlace, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save = saving(run, max_to_keep=2)
    copy = new_copy(run, place)
    for step in (1, 2, 3, 4):
        save(step)
        copy.push_checkpoints()
    copy.push_files()
    assert whole(place) == ["model.ckpt-3", "model.ckpt-4"]
    shutil.rmtree(run)  # another machine
    copy = new_copy(run, place, keep=3)
    for step in (5, 6):
        save(step)
        copy.push_checkpoints()
    assert whole(place) == ["model.ckpt-4", "model.ckpt-5", "model.ckpt-6"]


def test_what_a_killed_process_left_of_an_upload_is_removed_later(place: FolderPlace, tmp_path: Path) -> None:
    new_copy(tmp_path / "run", place)
    place.write("model.ckpt-1~1-0000abcd/state.pt", b"a part")
    copy = new_copy(tmp_path / "run", place)
    save = saving(tmp_path / "run")
    save(1)
    copy.push_checkpoints()
    assert any("0000abcd" in name for name in place.names())  # may be written right now
    save(2)
    copy.push_checkpoints()
    assert not any("0000abcd" in name for name in place.names())


def test_what_another_job_has_completed_meanwhile_is_not_removed(place: FolderPlace, tmp_path: Path) -> None:
    new_copy(tmp_path / "run", place)
    place.write("model.ckpt-1~1-0000abcd/state.pt", b"a part")
    copy = new_copy(tmp_path / "run", place)
    place.write("model.ckpt-1~1-0000abcd/manifest.json", b"{}")
    save = saving(tmp_path / "run")
    for step in (1, 2):
        save(step)
        copy.push_checkpoints()
    assert "model.ckpt-1~1-0000abcd/state.pt" in place.names()


# -- 3: an upload that began ------------------------------------------------------------------------------------------


def test_a_store_that_is_slower_than_the_saves_has_a_late_copy_and_says_so(
    s3: S3Place, tmp_path: Path, lines: Lines
) -> None:
    save = saving(tmp_path / "run", max_to_keep=1)
    copy = new_copy(tmp_path / "run", s3)
    save(0)
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(ask: Callable[[], proxies.Answer]) -> proxies.Answer:
        has_begun.set()
        may_end.wait(60)
        return ask()

    s3.fault("PUT", "state.pt", slow)
    uploading = threading.Thread(target=copy.push_checkpoints)
    uploading.start()
    assert has_begun.wait(60)
    for step in (1, 2, 3):
        save(step)  # and removes the one before
    may_end.set()
    uploading.join()
    put = [path for method, path, _ in s3.proxy.requests if method == "PUT" and "manifest" in path]
    assert [re.sub(".*/run-17/(.*)~.*", r"\1", path) for path in put] == ["model.ckpt-0", "model.ckpt-3"]
    [warning] = warnings_in(lines)
    assert re.match(rf"{s3.url} is late: model.ckpt-0 is whole there \d+ s after it was saved, and .* newer", warning)


@pytest.mark.parametrize("links", [True, False])
def test_what_is_being_uploaded_cannot_be_removed(
    place: FolderPlace, tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    saving(tmp_path / "run")(3)
    copy = new_copy(tmp_path / "run", place)
    if isinstance(place, S3Place):
        place.fault("PUT", "manifest", proxies.unavailable)
    else:
        (tmp_path / "store/mirror.json").rename(tmp_path / "hidden")
    with pytest.raises(StoreError):
        copy.push_checkpoints()
    shutil.rmtree(tmp_path / "run/model.ckpt-3")
    if isinstance(place, S3Place):
        place.proxy.fault = lambda method, path: None
    else:
        (tmp_path / "hidden").rename(tmp_path / "store/mirror.json")
    assert copy.push_checkpoints() == ["model.ckpt-3"]
    shutil.rmtree(tmp_path / "run")
    assert new_copy(tmp_path / "run", place).missing() == []
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [3]


def test_at_the_end_the_newest_comes_first_and_then_those_kept_for_good(place: FolderPlace, tmp_path: Path) -> None:
    save = saving(tmp_path / "run", max_to_keep=1, keep_checkpoint_every_n_hours=1e-9)
    copy = new_copy(tmp_path / "run", place)
    for step in (1, 2, 3):
        save(step)
    copy.deadline = time.monotonic() + 60
    assert copy.missing() == ["model.ckpt-3", "model.ckpt-2", "model.ckpt-1"]
    assert copy.push_checkpoints() == ["model.ckpt-3", "model.ckpt-2", "model.ckpt-1"]
    assert copy.missing() == []


def test_an_upload_that_the_store_has_only_confirmed_is_not_taken_for_whole(s3: S3Place, tmp_path: Path) -> None:
    saving(tmp_path / "run")(3)
    copy = new_copy(tmp_path / "run", s3)
    for file in ("state.pt", "manifest.json"):
        s3.fault("PUT", file, proxies.ignored, times=1)
        with pytest.raises(StoreError, match=r"does not have what was written to model\.ckpt-3~1-"):
            copy.push_checkpoints()
        assert whole(s3) == []
    assert copy.push_checkpoints() == ["model.ckpt-3"]
    (tmp_path / "run/curve.jsonl").write_text("curve")
    s3.fault("PUT", "curve.jsonl", proxies.ignored, times=1)
    assert (copy.push_files(), "curve.jsonl" in s3.names()) == ([], False)
    assert (copy.push_files(is_last=True), s3.read("curve.jsonl")) == ([], b"curve")


def test_a_checkpoint_that_is_finished_later_gets_another_manifest_and_is_not_uploaded_again(
    place: FolderPlace, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    saving(run)(3)
    copy = new_copy(run, place)
    copy.push_checkpoints()
    names = place.names()
    Folder(str(run), Disk(), Retention(5, None)).mark_finished("model.ckpt-3", "data ended")
    assert copy.missing() == ["model.ckpt-3"]
    if isinstance(place, S3Place):
        place.fault("PUT", "state.pt", proxies.unavailable)
    assert copy.push_checkpoints() == ["model.ckpt-3"]
    assert (copy.missing(), place.names()) == ([], names)
    new_copy(tmp_path / "new", place)
    assert [checkpoint.finished for checkpoint in list_checkpoints(tmp_path / "new")] == ["data ended"]


# -- 4 and 9: other files ---------------------------------------------------------------------------------------------


def test_special_files_locks_and_temporary_files_are_left_out_and_cost_nothing_else(
    place: FolderPlace, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    saving(run)(3)
    (run / "traces").mkdir()
    (run / "traces/trace.json").write_text("{}")
    (run / "link").symlink_to(run / "traces")
    os.mkfifo(run / "fifo")
    for name in ("part.tmp", "data.lock", ".hidden", "nan.json"):
        (run / name).write_text(name)
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(run)  # a socket's path is short
        listening.bind("socket")
        copy = new_copy(run, place)
        assert copy.push_checkpoints() == ["model.ckpt-3"]
        assert (copy.push_files(), copy.push_files(), copy.missing()) == ([], [], [])
    assert [name for name in place.names() if "ckpt" not in name] == ["files.json", "mirror.json", "traces/trace.json"]
    [warning] = warnings_in(lines)
    assert warning.endswith(": fifo, link, socket")


def test_a_file_that_fails_costs_itself_alone_and_the_warning_has_the_reason(
    s3: S3Place, tmp_path: Path, lines: Lines
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (run / name).write_text(name)
    copy = new_copy(run, s3)
    s3.fault("PUT", "b.txt", proxies.refused)
    assert (copy.push_files(), copy.push_files()) == (["b.txt"], ["b.txt"])
    assert {"a.txt", "c.txt"} < set(s3.names())
    [warning] = warnings_in(lines)
    assert re.fullmatch(r"b.txt is not copied \(PermissionError: .*\); it is tried again", warning)
    s3.proxy.fault = lambda method, path: proxies.unavailable
    with pytest.raises(StoreError):  # not the file's fault
        copy.push_files()
    assert len(warnings_in(lines)) == 1


def test_a_file_that_the_disk_does_not_read_costs_itself_alone(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(folder: str, names: list[str]) -> Any:
        if names == ["b.txt"]:
            raise OSError(errno.EIO, "Input/output error")
        return file_sums(folder, names)

    run, place = tmp_path / "run", FolderPlace(tmp_path / "store")
    run.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (run / name).write_text(name)
    copy = new_copy(run, place)
    monkeypatch.setattr(torchhooks.tools.mirror.copy, "file_sums", read)
    assert copy.push_files() == ["b.txt"]
    assert {"a.txt", "c.txt"} < set(place.names())
    [warning] = warnings_in(lines)
    assert warning == "b.txt is not copied ([Errno 5] Input/output error); it is tried again"


def test_a_file_that_became_a_folder_and_the_reverse_come_back_as_they_are_now(
    place: FolderPlace, tmp_path: Path
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    copy = new_copy(run, place)
    (run / "a").write_text("file")
    (run / "b").mkdir()
    (run / "b/c").write_text("in a folder")
    saving(run)(1)
    copy.push_checkpoints()
    copy.push_files()
    new_copy(other, place)
    (run / "a").unlink()
    (run / "a").mkdir()
    (run / "a/c").write_text("in a folder")
    shutil.rmtree(run / "b")
    (run / "b").write_text("file")
    saving(run)(2)
    copy = new_copy(run, place)
    copy.push_checkpoints()
    copy.push_files()
    new_copy(other, place)
    assert ((other / "a/c").read_text(), (other / "b").read_text()) == ("in a folder", "file")


def test_a_file_that_cannot_be_read_from_the_copy_is_not_overwritten_there(
    s3: S3Place, tmp_path: Path, lines: Lines
) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    saving(run)(1)
    (run / "curve.jsonl").write_text("a long curve")
    copy = new_copy(run, s3)
    copy.push_checkpoints()
    copy.push_files()
    s3.fault("GET", "curve.jsonl", proxies.halved)
    copy = new_copy(new, s3)
    (new / "curve.jsonl").write_text("short")
    assert copy.push_files() == []
    assert s3.read("curve.jsonl") == b"a long curve"
    [warning] = warnings_in(lines)
    assert warning.startswith("curve.jsonl cannot be read from ")


def test_names_that_lead_out_of_the_folder_are_ignored(tmp_path: Path) -> None:
    store = Store("memory://bucket/escape")
    (tmp_path / "evil").write_text("evil")
    store.put(str(tmp_path / "evil"), "../evil")
    store.put(str(tmp_path / "evil"), "good")
    assert store.list() == {"good": 4}


# -- 5: what is the same ----------------------------------------------------------------------------------------------


def test_a_file_is_uploaded_again_only_if_its_contents_have_changed(place: FolderPlace, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    path = run / "settings.json"
    path.write_text("lr=0.1")
    old = 1_700_000_000
    os.utime(path, (old, old))

    def uploads(copy: torchhooks.tools.mirror.copy.Copy) -> bool:
        place.write("settings.json", b"sixsix")  # as long as the file
        assert copy.push_files() == []
        return place.read("settings.json") == path.read_bytes()

    copy = new_copy(run, place)
    assert uploads(copy)
    assert not uploads(copy)
    path.touch()
    assert not uploads(copy)
    path.write_text("lr=0.2")
    os.utime(path, (old, old))  # as long and as old as before
    assert uploads(copy)
    assert not uploads(new_copy(run, place))
    path.write_text("lr=0.3")
    os.utime(path, (old, old))
    assert uploads(new_copy(run, place))


@pytest.mark.parametrize("index", [b"<html>", b'{"files": {"curve.jsonl": [1, 2]}}', b'{"files": {"curve.jsonl": 5}}'])
def test_a_damaged_index_is_named_and_costs_an_upload(tmp_path: Path, lines: Lines, index: bytes) -> None:
    place = FolderPlace(tmp_path / "store")
    copy = new_copy(tmp_path / "run", place)
    saving(tmp_path / "run")(3)
    (tmp_path / "run/curve.jsonl").write_text("curve")
    copy.push_checkpoints()
    copy.push_files()
    whole_index = place.read("files.json")
    place.write("files.json", index)
    copy = new_copy(tmp_path / "new", place)
    assert (tmp_path / "new/curve.jsonl").read_text() == "curve"
    assert warnings_in(lines) == [f"{place.url} has a damaged files.json: all files but checkpoints are copied again"]
    assert copy.push_files() == []
    assert json.loads(place.read("files.json")).keys() == json.loads(whole_index).keys()


@pytest.mark.slow
def test_the_command_copies_to_the_store_and_from_it_and_says_what_it_could_not_copy(
    s3: S3Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    saving(run)(3)
    (run / "curve.jsonl").write_text('{"step": 3}')
    monkeypatch.setitem(fsspec.config.conf, "s3", s3.options)
    s3.fault("PUT", "curve.jsonl", proxies.ignored)
    assert main(["mirror", str(run), s3.url]) == 1
    assert capsys.readouterr().err == f"{s3.url}: not everything was copied, it lacks curve.jsonl\n"
    s3.proxy.fault = lambda method, path: None
    assert main(["mirror", str(run), s3.url]) == 0
    assert capsys.readouterr().out == f"{run} was copied to {s3.url}: no newer checkpoint\n"
    assert main(["mirror", s3.url, str(tmp_path / "back")]) == 0
    assert capsys.readouterr().out == f"{s3.url} was copied to {tmp_path}/back: model.ckpt-3\n"
    assert (tmp_path / "back/curve.jsonl").read_text() == '{"step": 3}'
    assert main(["mirror", s3.url, str(tmp_path / "other"), "--json"]) == 0
    assert answer("mirror", capsys.readouterr().out) == {
        "source": s3.url,
        "target": f"{tmp_path}/other",
        "checkpoints": ["model.ckpt-3"],
    }


# -- 6: addresses -----------------------------------------------------------------------------------------------------


def test_a_store_that_is_a_folder_never_has_a_part_of_a_file(tmp_path: Path) -> None:
    store = Store((tmp_path / "store").as_uri())
    store.make()
    store.write("name", b"old")
    (tmp_path / "file").write_bytes(b"new")
    with open(tmp_path / "store/name", "rb") as reading:
        store.put(str(tmp_path / "file"), "name")
        assert (reading.read(), store.read("name"), store.list()) == (b"old", b"new", {"name": 3})
    (tmp_path / "store/.name.0000.tmp").write_bytes(b"pa")  # of a killed process
    assert store.list() == {"name": 3}
    shutil.rmtree(tmp_path / "store")  # such as a disk that is not mounted any more
    with pytest.raises(StoreError, match="is gone"):
        store.write("name", b"new")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["a//b", "a@b", "a?b=c", "a b", "a#b", "a%20b", "a[b]*"])
def test_an_address_is_shown_as_it_is_and_every_name_works(place: FolderPlace, tmp_path: Path, name: str) -> None:
    url = f"{place.url}/{name}/"
    if "file://" in url:
        (tmp_path / "store" / name).parent.mkdir(parents=True)
    store = Store(url, place.options)
    assert store.url == f"{place.url}/{name.replace('//', '/')}"
    store.make()
    store.write("x/y", b"data")
    assert (store.list(), store.list("x"), store.read("x/y", 1, 3)) == ({"x/y": 4}, {"x/y": 4}, b"at")
    store.remove("x/y")
    assert (store.list(), store.read("x/y")) == ({}, None)


# -- 8: status --------------------------------------------------------------------------------------------------------


def test_an_address_without_a_copy_has_no_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store").mkdir()
    assert main(["status", (tmp_path / "store").as_uri()]) == 1
    assert "has no mirror.json, " in capsys.readouterr().err


@pytest.mark.slow
def test_the_status_of_a_copy_is_read_from_a_small_part_of_it(
    s3: S3Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    saving(run)(3)
    lines = [json.dumps({"step": step, "time": 1e9 + step, "loss": 0.5}) for step in range(50_000)]
    (run / "curves.jsonl").write_text("\n".join(lines) + "\n")
    writer = DirectSummaryWriter(str(run))
    for step in range(20_000):
        writer.add_scalar("lr", 0.1, step, walltime=1e9 + step)
    writer.close()
    (run / "trace.json").write_bytes(bytes(10_000_000))
    copy = new_copy(run, s3)
    copy.push_checkpoints()
    copy.push_files()
    monkeypatch.setitem(fsspec.config.conf, "s3", s3.options)
    s3.proxy.requests.clear()
    assert main(["status", s3.url]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"checkpoint +model.ckpt-3, whole, [\d,]+ bytes", printed)
    assert re.search(r"loss +0.5 at step 49999", printed)
    assert re.search(r"lr +0.1 at step 19999", printed)
    paths = [path for _, path, _ in s3.proxy.requests]
    read = {path.rpartition("/")[2] for path in paths if "run-17/" in path and "list-type" not in path}
    events = {name for name in os.listdir(run) if "tfevents" in name}
    assert read <= {"mirror.json", ".run.json", "manifest.json", "curves.jsonl", *events}
    assert sum(size for _, _, size in s3.proxy.requests) < 600_000


@pytest.mark.parametrize(
    ("age", "changes", "state", "code"),
    [
        (20, {}, "running, process 1 on another, since 10 min ago", 0),
        (
            20,
            {"run_time": 7.0, "stalled": "in run 8 (in a save)"},
            "stalled for 10 min in run 8 (in a save), process 1 on another",
            1,
        ),
        (200, {}, "no sign of life of process 1 on another since 3 min ago: killed, or out of reach", 1),
        (200, {"stopped": "data ended"}, "ended 3 min ago: data ended", 0),
        (200, {"stopped": "OSError: x", "failed": True}, "failed 3 min ago: OSError: x", 1),
    ],
)
def test_the_status_of_a_copy_goes_by_the_age_of_the_object_and_not_by_the_clock_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], age: int, changes: dict[str, object], state: str, code: int
) -> None:
    place = FolderPlace(tmp_path / "store")
    copy = new_copy(tmp_path / "run", place)
    record = Record(1, "another", 1, began=0.0, began_at=0, time=600.0, step=7, run_time=590.0)._asdict()
    (tmp_path / "run/.run.json").write_text(json.dumps(record | changes))
    copy.push_record()
    written = time.time() - age
    os.utime(tmp_path / "store/.run.json", (written, written))
    assert main(["status", place.url]) == code
    assert re.search(rf"state +{re.escape(state)}\n", capsys.readouterr().out)


# -- 10: two jobs -----------------------------------------------------------------------------------------------------


def test_the_newest_job_wins(place: FolderPlace, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    save_one = saving(one)
    older = new_copy(one, place)
    save_one(1)
    older.push_checkpoints()
    newer = new_copy(two, place)
    assert [checkpoint.step for checkpoint in list_checkpoints(two)] == [1]
    save_one(2)
    (one / "curve.jsonl").write_text("of the older job")
    for push in (older.push_checkpoints, older.push_files, older.push_record):
        with pytest.raises(OtherJobError):
            push()
    saving(two)(3)
    assert newer.push_checkpoints() == ["model.ckpt-3"]
    assert whole(place) == ["model.ckpt-1", "model.ckpt-3"]
    assert "curve.jsonl" not in place.names()


def test_a_folder_of_another_training_run_is_an_error(place: FolderPlace, tmp_path: Path) -> None:
    one, two, three = tmp_path / "one", tmp_path / "two", tmp_path / "three"
    early = new_copy(two, place)  # both begin before there is a checkpoint
    copy = new_copy(one, place)
    saving(one)(1)
    copy.push_checkpoints()
    saving(two)(2)
    with pytest.raises(OtherJobError):
        early.push_checkpoints()
    saving(three)(1)  # was never copied
    for folder in (two, three):
        with pytest.raises(CheckpointError, match="is the copy of another training run than"):
            new_copy(folder, place)
    shutil.copytree(one, tmp_path / "moved")
    new_copy(tmp_path / "moved", place)
    assert whole(place) == ["model.ckpt-1"]


@pytest.mark.parametrize("where", ["run", "run/copy", "."])
def test_a_copy_in_the_folder_or_around_it_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match="cannot be in that folder, or around it: give another address"):
        new_copy(tmp_path / "run", FolderPlace(tmp_path / where))
    assert list((tmp_path / "run").iterdir()) == []


# -- credentials ------------------------------------------------------------------------------------------------------

SECRET = "s3cr/et+&<\"'=é%"


@pytest.mark.parametrize(
    "options",
    [
        {"secret": SECRET},
        {"client_kwargs": {"headers": [("Authorization", SECRET)]}},
        {"secret": SECRET.encode()},
        {"proxies": [f"http://user:{SECRET.replace('/', '')}@proxy:80"]},
        {"connection_string": f"AccountName=run;AccountKey={SECRET};EndpointSuffix=x"},
        {},
    ],
)
def test_values_of_storage_options_and_of_the_environment_are_in_no_text(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = SECRET.replace("/", "") if "proxies" in options else SECRET
    if not options:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    hide = Secrets("s3://bucket/run", options).hide
    quoted = urllib.parse.quote(secret, safe="")
    forms = (secret, quoted, quoted.lower(), html.escape(secret), json.dumps(secret), repr(secret))
    for form in (*forms, urllib.parse.quote_plus(secret)):
        assert "3cr" not in hide(f"failed with {form}, sorry")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://KEY12:SECRET34@bucket/run@2", "s3://bucket/run@2"),
        ("s3://KEY12:SEC/RET34@bucket/run", "s3://bucket/run"),
        ("ftp://user:SECRET%2F34@host:21/run", "ftp://host:21/run"),
        ("https://host/run?sig=SECRET34&x=1", "https://host/run?***"),
        ("s3://bucket/run@2?x", "s3://bucket/run@2?x"),
        ("ftp://host:21/run@2", "ftp://host:21/run@2"),
    ],
)
def test_an_address_is_shown_without_user_and_password(url: str, shown: str) -> None:
    secrets = Secrets(url)
    assert secrets.url == shown
    assert not re.search("SECRET|RET34|KEY12", secrets.hide(f"failed: {url}, {urllib.parse.unquote(url)}"))


def test_an_error_of_the_library_is_not_attached(s3: S3Place) -> None:
    store = Store(s3.url, {**s3.options, "key": "KEY12", "secret": "SECRET34"})
    s3.proxy.fault = lambda method, path: lambda ask: proxies.Answer(400, {}, b"KEY12:SECRET34 is wrong")
    with pytest.raises(StoreError) as raised:
        store.list()
    text = "".join(traceback.format_exception(raised.value))
    assert raised.value.__context__ is None
    assert not re.search("SECRET34|KEY12", text)
    wrong = "nosuch://KEY12:SECRET34@bucket/run"
    with pytest.raises(ValueError, match="nosuch://bucket/run") as refused:
        Store(wrong)
    assert not re.search("SECRET34|KEY12", "".join(traceback.format_exception(refused.value)))

"""The process that starts those of a script: whatever ends ``check``, nothing is left."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import Manager
from pathlib import Path
from typing import Any

import pytest
from support.processes import start

from torchhooks.tools.ledger import as_main, keeper
from torchhooks.tools.ledger.keeper import CheckError, Ending, Keeper, Start

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_LEFT_SECS", 0.05)
    monkeypatch.setattr(keeper, "can_fork", lambda: False)  # nothing of torch is needed here


def run(keeper: Keeper, folder: Path, become: Callable[..., object], *arguments: Any, **fields: Any) -> Ending:
    fields = {"ranks": 1, "secs": 60.0, **fields}
    return keeper.run(
        Start(partial(become, folder, *arguments), over=str(folder / "over"), stacks=str(folder / "stacks"), **fields)
    )


def leave(folder: Path, code: int, rank: int) -> None:
    os._exit(code + rank)


@pytest.mark.parametrize(("code", "codes"), [(0, [0, 1]), (7, [7, 8])])
def test_it_tells_how_the_processes_of_all_ranks_have_ended(code: int, codes: list[int], tmp_path: Path) -> None:
    with Keeper(str(tmp_path)) as kept:
        assert run(kept, tmp_path, leave, code, ranks=2) == Ending(codes)
        assert run(kept, tmp_path, leave, code) == Ending(codes[:1])
    assert tmp_path.exists()


def kill(folder: Path, rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error(folder: Path, rank: int) -> None:
    raise KeyError("no such thing")


def test_a_signal_and_an_error_are_told(tmp_path: Path) -> None:
    with Keeper(str(tmp_path)) as kept:
        assert run(kept, tmp_path, kill) == Ending([-9])
        assert run(kept, tmp_path, raise_error) == Ending([1])


def leave_processes(folder: Path, way: str, rank: int) -> None:
    """Start processes that stay, in other sessions, and that end at SIGKILL only. They hold the files of this one."""
    read, write = os.pipe()
    if not os.fork():
        os.setsid()
        if not os.fork():  # its parent ends: a daemon
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(write, b".")
            time.sleep(600)
        os._exit(0)
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    Manager().dict()
    os.read(read, 1)
    (folder / "started").touch()
    if way == "over":
        (folder / "over").touch()
    if way != "ends":
        time.sleep(600)
    os._exit(0)


def nothing_holds(pipe: int) -> bool:
    """Return whether all other processes that had the other end of ``pipe`` have ended, within a minute."""
    return bool(select.select([pipe], [], [], 60)[0]) and os.read(pipe, 1) == b""


@slow
@pytest.mark.parametrize("way", ["ends", "over", "takes too long"])
def test_no_process_of_the_script_is_left_in_whatever_session(way: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    with Keeper(str(tmp_path)) as kept:
        os.close(write)
        ending = run(kept, tmp_path, leave_processes, way, secs=1.0 if way == "takes too long" else 60.0)
    assert (ending.is_over, ending.is_late) == (way == "over", way == "takes too long")
    assert nothing_holds(read)
    os.close(read)


@slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_whatever_ends_check_no_process_and_no_folder_is_left(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = tmp_path / "end"
    os.mkfifo(end)
    read = os.open(end, os.O_RDONLY | os.O_NONBLOCK)
    process = start(tmp_path / "output", hold_and_check, tmp_path, end)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    scratch = Path((tmp_path / "keeper").read_text())
    assert scratch.is_dir()
    assert scratch.parent == tmp_path
    process.send_signal(number)
    process.join()
    assert nothing_holds(read)
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not scratch.exists()
    os.close(read)


def hold_and_check(folder: Path, end: Path) -> None:
    os.open(end, os.O_WRONLY)  # open in this process and in all that come of it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(keeper, "_LEFT_SECS", 0.05)
        monkeypatch.setattr(keeper, "can_fork", lambda: False)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with Keeper() as kept:
            (folder / "keeper").write_text(kept.folder)
            run(kept, folder, leave_processes, "stays", secs=600.0)


def leave_one_in_the_session(folder: Path, rank: int) -> None:
    read, write = os.pipe()
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(write, b".")
        time.sleep(600)
    os.read(read, 1)
    os._exit(0)


@slow
def test_where_the_system_does_not_tell_which_processes_there_are_sessions_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_PROCESSES", str(tmp_path / "none"))
    read, write = os.pipe()
    with Keeper(str(tmp_path)) as kept:
        os.close(write)
        assert run(kept, tmp_path, leave_one_in_the_session) == Ending([0])
    assert nothing_holds(read)
    os.close(read)


def test_a_signal_waits_until_there_is_something_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Ctrl-C that comes between the two processes is raised after the fork, and the process knows its end."""
    fork, keepers = os.fork, []

    def fork_and_press() -> int:
        child = fork()
        if child:
            keepers.append(child)
            os.kill(os.getpid(), signal.SIGINT)
        return child

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(os, "fork", fork_and_press)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        with pytest.raises(KeyboardInterrupt):
            Keeper()
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ChildProcessError):
        os.waitpid(keepers[0], 0)  # it has been waited for
    assert not [*tmp_path.iterdir()]


def test_a_keeper_that_was_killed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Keeper() as kept:
        os.kill(kept.process, signal.SIGKILL)
        with pytest.raises(CheckError, match="was killed"):
            run(kept, tmp_path, leave, 0)
    assert not [*tmp_path.iterdir()]


def test_without_forks_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(CheckError, match="which this operating system does not have"):
        Keeper()


def test_a_scratch_folder_stays_if_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for keeps in (True, False):
        with Keeper() as kept:
            if keeps:
                kept.keep()
            folder = Path(kept.folder)
            assert folder.is_dir()
        assert folder.exists() == keeps


def plan_in(folder: Path) -> dict[str, Any]:
    return {name: str(folder / name) for name in ("stacks", "written", "connected", "places")} | {"folders": []}


def stand(folder: Path, rank: int) -> None:
    as_main.prepare(plan_in(folder))
    wait_for_something()


def wait_for_something() -> None:
    (Path.cwd() / "stands").touch()
    time.sleep(600)


@slow
def test_a_process_that_takes_too_long_tells_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Keeper(str(tmp_path)) as kept:
        ending = run(kept, tmp_path, stand, secs=1.0)
    assert ending.is_late
    assert re.search(r'File "\S*test_keeper.py", line \d+ in wait_for_something', "".join(ending.stacks))


# -- a script as the main module --------------------------------------------------------------------------------------

PRINTS = """
import sys, __main__
print(__name__, __file__, __package__, __spec__ and __spec__.name, sys.argv, sys.path[0])
print(__main__.sys is sys, sys.modules["__main__"].__dict__ is globals())
if "exits" in sys.argv:
    sys.exit(3)
if "says" in sys.argv:
    sys.exit("no data")
if "raises" in sys.argv:
    raise KeyError("x")
"""


@slow
@pytest.mark.parametrize("way", ["", "exits", "says", "raises"])
def test_a_script_is_what_it_is_without_check(way: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for path in ("train.py", "package/__init__.py", "package/train.py", "package/__main__.py"):
        (tmp_path / path).write_text("" if "init" in path else PRINTS)
    (tmp_path / "plan").write_text(json.dumps(plan_in(tmp_path)))
    environment = {**os.environ, "TORCHHOOKS_CHECK": str(tmp_path / "plan")}
    for target in (["train.py"], ["./package/train.py"], ["-m", "package.train"], ["-m", "package"]):
        command = [*target, way]
        plain, checked = (
            subprocess.run(
                [sys.executable, *begin, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            for begin in ([], [as_main.__file__])
        )
        assert (plain.stdout, plain.returncode) == (checked.stdout, checked.returncode), checked.stderr
        assert plain.stderr.splitlines()[-1:] == checked.stderr.splitlines()[-1:]


@pytest.mark.parametrize(
    ("address", "machine"),
    [
        (("10.0.0.7", 443), "10.0.0.7:443"),
        (("2001:db8::1", 80, 0, 0), "2001:db8::1:80"),
        (("127.0.0.1", 29500), ""),
        (("localhost", 29500), ""),
        (("::1", 29500, 0, 0), ""),
        ("/tmp/socket", ""),
        (b"\0abstract", ""),
    ],
)
def test_an_address_of_another_machine_is_known(address: object, machine: str) -> None:
    assert as_main.other_machine(address) == machine


def test_paths_in_a_folder_of_the_training_run_are_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scratch, real = tmp_path / "scratch", tmp_path / "run"
    (real / "model.ckpt-3").mkdir(parents=True)
    (real / "config.txt").touch()
    redirection = as_main.Redirection(str(scratch), [str(real), str(tmp_path)])
    placed = str(scratch) + str(real)
    assert redirection.placed("run/x") == redirection.placed(real / "x") == f"{placed}/x"
    for elsewhere in ("runs", "x", f"{placed}/x", "run/..", 3, b"run/x"):
        assert redirection.placed(elsewhere) is None
    assert redirection.to_read("run/config.txt") == "run/config.txt", "what the user has put there is found"
    assert redirection.to_read("run/model.ckpt-3") == f"{placed}/model.ckpt-3", "what a training run has left is not"
    names = redirection.listing(os.listdir)
    entries = redirection.listing(os.scandir)
    assert names("run") == ["config.txt"]
    with entries("run") as listed:
        assert [each.name for each in listed] == ["config.txt"]
    Path(redirection.to_write("run/new.txt")).touch()
    assert names("run") == ["new.txt"]
    assert [each.name for each in entries("run")] == ["new.txt"]
    assert redirection.to_read("run/new.txt") == f"{placed}/new.txt"
    assert not (real / "new.txt").exists()
    rename = as_main.moved(os.rename, src=redirection.to_read, dst=redirection.to_write)
    rename("run/new.txt", dst="run/newer.txt")
    number = os.open("run", os.O_RDONLY)
    rename("config.txt", "new.txt", src_dir_fd=number, dst_dir_fd=number)  # relative to a folder that is open
    os.close(number)
    assert (names("run"), sorted(os.listdir("run"))) == (["newer.txt"], ["model.ckpt-3", "new.txt"])
    monkeypatch.chdir(real)
    assert redirection.placed("x") is None, "a script that runs there has its files there"

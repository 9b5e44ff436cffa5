"""Which process a number means, and whether it is there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import wait_until

from torchhooks.common import processes
from torchhooks.common.processes import is_alive, process_name, process_state, start_time, system_id

HOST = socket.gethostname()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_is_known_by_when_it_began(child: subprocess.Popen[bytes]) -> None:
    began = start_time(child.pid)
    assert began > 0
    assert is_alive(child.pid, began, system_id(), HOST)
    assert is_alive(child.pid, began + 1, system_id(), HOST) is False, "another process has its number"
    assert is_alive(child.pid, 0, system_id(), HOST), "it is not known when it began"
    child.kill()
    wait_until(lambda: process_state(child.pid) == "Z")
    assert is_alive(child.pid, began, system_id(), HOST) is False, "it is dead, and its parent has not waited for it"


def test_a_number_of_another_boot_or_container_says_nothing(child: subprocess.Popen[bytes]) -> None:
    began = start_time(child.pid)
    assert is_alive(child.pid, began, "another boot pid:[1]", HOST) is None
    assert is_alive(child.pid, began, system_id(), "another name"), "a machine may get another name"
    assert is_alive(child.pid, began, None, HOST), "without /proc, its host is known by its name"
    assert is_alive(child.pid, began, None, "another") is None


def test_a_number_that_no_process_can_have_is_that_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_alive(2**40, 1, system_id(), HOST) is False
    without_proc(monkeypatch)
    assert is_alive(2**40, 0, None, HOST) is False
    assert (system_id.__wrapped__(), process_state(os.getpid())) == (None, "")


def test_a_stopped_process_says_so(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: process_state(child.pid) == "T")
    assert is_alive(child.pid, start_time(child.pid), system_id(), HOST)


def without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *_: Any, **__: Any) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(processes, "open", refuse, raising=False)
    monkeypatch.setattr(os.path, "exists", lambda path: False)


def test_without_proc_a_process_is_looked_up_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with monkeypatch.context() as patched:
        without_proc(patched)
        patched.setattr(os.path, "exists", lambda path: True)
        assert process_name(os.getpid()).endswith("--1"), "its folder is gone, though there is /proc"
    without_proc(monkeypatch)
    assert process_name(os.getpid()).endswith(f"-{os.getpid()}-0")
    assert process_name(os.getppid()).endswith("-0")
    assert process_name(ended.pid).endswith("--1")
    monkeypatch.setattr(processes, "fcntl", None)  # as on Windows
    assert process_name(os.getppid()).endswith("--1")
    assert is_alive(os.getppid(), 0, None, HOST) is None
    assert is_alive(os.getpid(), 0, None, HOST)

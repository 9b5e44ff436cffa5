"""The processes of tests: tests/support/processes.py, and its fork server."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
from support.processes import call, fork_program, start, start_program
from support.waiting import wait_until


def test_a_program_has_its_arguments_its_streams_and_its_exit_code() -> None:
    ran = fork_program("import sys; print(sys.argv[1:]); print('no', file=sys.stderr); sys.exit(3)", "a", "b c")
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "['a', 'b c']\n", "no\n")


def test_a_program_ends_as_in_any_interpreter() -> None:
    ran = fork_program("import atexit; atexit.register(print, 'at exit'); raise KeyError('a')")
    assert (ran.returncode, ran.stdout) == (1, "at exit\n")
    assert ran.stderr.endswith("KeyError: 'a'\n")
    assert fork_program("raise KeyboardInterrupt").returncode == -signal.SIGINT


def test_a_program_has_the_folder_and_the_environment_of_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THIS_TEST", "1")
    assert fork_program("import os; print(os.getcwd(), os.environ['OF_THIS_TEST'])").stdout == f"{tmp_path} 1\n"


def tell(text: str, where: Path) -> None:
    print(text)
    where.write_text(text)


def test_a_function_is_called_with_its_arguments(tmp_path: Path) -> None:
    assert call(tell, "told", tmp_path / "told") == (0, "told\n")
    assert (tmp_path / "told").read_text() == "told"


def fail() -> None:
    raise ValueError("on purpose")


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_an_error_and_a_warning_of_a_function_end_its_process_with_1() -> None:
    ended = call(fail)
    assert ended.code == 1
    assert ended.output.endswith("ValueError: on purpose\n")
    assert call(warn).code == 1
    assert call(warn, ignored=("careful",)).code == 0


def sleep() -> None:
    print("sleeping")
    time.sleep(600)


def test_a_process_runs_beside_others_until_it_is_killed(tmp_path: Path) -> None:
    sleeping = start(tmp_path / "output", sleep)
    wait_until(lambda: sleeping.output.read_text() == "sleeping\n")
    assert fork_program("print(1)").stdout == "1\n"
    sleeping.join(0.01)
    assert sleeping.is_alive()
    sleeping.kill()
    assert (sleeping.is_alive(), sleeping.exitcode) == (False, -signal.SIGKILL)


def test_a_process_may_lead_a_session_of_its_own(tmp_path: Path) -> None:
    program = "import os; print(os.getsid(0) == os.getpid())"
    for new_session in (False, True):
        process = start_program(program, output=tmp_path / "output", new_session=new_session)
        process.join()
        assert process.output.read_text() == f"{new_session}\n"


def test_the_processes_have_imported_torch_already() -> None:
    found = fork_program("import sys, os; print('torch' in sys.modules, os.getppid())").stdout.split()
    assert found[0] == "True"
    assert int(found[1]) != os.getpid()
    assert "torch" in sys.modules

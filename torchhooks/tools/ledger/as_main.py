"""Runs a script as the main module of this process under ``check``, as Python would.

A process that is forked for ``check`` calls :func:`prepare` and :func:`run`. A new one is started with this file in
place of the script, so that this file imports nothing that Python itself does not bring.

What torchhooks writes to is placed in a scratch folder. What the script itself lists, opens or asks for there is looked
up in the same place: a script that lists its checkpoints gets those of its own training run.
"""

from __future__ import annotations

import builtins
import faulthandler
import io
import json
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

# Not SIGUSR1 or SIGUSR2, for which a script may have a handler, as OnSignal("SIGUSR1") sets one.
STACKS_SIGNAL: int | None = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else None
"""Has the process write where its threads stand; ``None`` where the system has no signals to spare."""

_WRITES = os.O_WRONLY | os.O_RDWR
_OF_TRAINING = re.compile(r"checkpoint|.*ckpt-\d+.*|events\.out\.tfevents.*|ledger")
"""The names of what a training run that was made without ``check`` has left in its folder."""

opened_by_c: Callable[[Any], Any] | None = None
"""Returns where a file is to be written that C code opens; ``None`` without ``check``."""


def prepare(plan: dict[str, Any]) -> None:
    """Have this process note what ``check`` wants to know of it. ``plan`` is the object in its plan file."""
    if STACKS_SIGNAL is not None:
        # Opened now: the handler is called whatever the process is doing.
        faulthandler.register(STACKS_SIGNAL, _log(f"{plan['stacks']}-{os.getpid()}"))
    # All files of check are opened before the redirection begins and the audit hook is added. The hook writes by
    # os.write(), of which Python tells no audit hook: an open() in it would call it again.
    here = os.path.join(os.getcwd(), "")
    written, connected = _log(plan["written"]), _log(plan["connected"])

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if isinstance(args[0], str) and isinstance(args[2], int) and args[2] & _WRITES:
                path = os.path.abspath(args[0])
                if path.startswith(here) and "__pycache__" not in path:
                    os.write(written, f"{path}\n".encode())
        elif event == "socket.connect":
            machine = other_machine(args[1])
            if machine:
                os.write(connected, f"{machine}\n".encode())

    def opened(path: str | os.PathLike[str]) -> str:
        file: str = os.fspath(redirection.to_write(path))
        note("open", (file, "w", os.O_WRONLY))
        return file

    global opened_by_c
    redirection = Redirection(plan["places"], plan["folders"])
    opened_by_c = opened
    redirection.begin()
    sys.addaudithook(note)


def _log(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def other_machine(address: object) -> str:
    """Return the address of another machine as ``"10.0.0.7:443"``; an empty string for this one."""
    if not isinstance(address, tuple) or len(address) < 2:  # a socket within this machine has a path
        return ""
    host, port = str(address[0]), address[1]
    is_here = host in ("localhost", "0.0.0.0", "::", "") or host.startswith(("127.", "::1", "::ffff:127."))
    return "" if is_here else f"{host}:{port}"


def run(script: list[str]) -> int:
    """Run ``script``, the path of a file or ``-m`` and the name of a module, with its arguments. Return its status."""
    # What spawned workers send has the main module under its name in multiprocessing.
    module = ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    try:
        if script[0] == "-m":
            sys.path[0] = os.getcwd()
            sys.argv[:] = script[1:]
            runpy._run_module_as_main(script[1])  # type: ignore[attr-defined]  # noqa: SLF001 - what python -m calls
        else:
            path = os.path.join(os.getcwd(), script[0])
            # Python puts the folder of the script there, and follows the link if the script is one.
            sys.path[0] = os.path.dirname(os.path.realpath(path))
            sys.argv[:] = script
            module.__file__ = path  # Python itself makes it absolute, whatever it was given
            with io.open_code(path) as file:
                # Otherwise, the script would be compiled with the future import of this module. And runpy.run_path()
                # would take the main module away at its end, when threads and functions of atexit may still need it.
                code = compile(file.read(), path, "exec", dont_inherit=True)
            exec(code, module.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


# -- folders that are placed elsewhere --------------------------------------------------------------------------------


class Redirection:
    """Sends what Python code asks of the file system to where ``check`` has placed a folder.

    Args:
        scratch: the folder in which others are placed.
        folders: those that earlier processes have placed. torchhooks knows those that this one places.
    """

    def __init__(self, scratch: str, folders: list[str]) -> None:
        self._inside = os.path.join(scratch, "")
        self._folders = {*folders}
        # Taken before begin() replaces them: the redirection itself has to look at a path as it is.
        self._exists, self._mkdir = _unless_missing(os.lstat), os.mkdir

    def begin(self) -> None:
        """Replace functions of ``os``, and ``open``. Files that C code opens are not moved."""
        read, written = self.to_read, self.to_write
        for name in ("stat", "lstat", "access", "readlink"):
            self._replace(name, moved(getattr(os, name), path=read))
        for name in ("mkdir", "rmdir", "remove", "unlink", "utime", "chmod", "truncate"):
            self._replace(name, moved(getattr(os, name), path=written))
        for name in ("rename", "replace", "link"):
            self._replace(name, moved(getattr(os, name), src=written, dst=written))
        # What a link leads to stays as the script writes it. moved() takes the parameters in order, so src needs a
        # function, too.
        self._replace("symlink", moved(os.symlink, src=lambda path: path, dst=written))
        self._replace("listdir", self.listing(os.listdir))
        self._replace("scandir", self.listing(os.scandir))
        creating, reading = moved(os.open, path=written), moved(os.open, path=read)
        writing_file, reading_file = moved(io.open, file=written), moved(io.open, file=read)

        @wraps(os.open)
        def open_number(path: Any, flags: int, *args: Any, **keywords: Any) -> Any:
            return (creating if flags & os.O_CREAT else reading)(path, flags, *args, **keywords)

        @wraps(io.open)
        def open_file(file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
            return (reading_file if {*"wax"}.isdisjoint(mode) else writing_file)(file, mode, *args, **keywords)

        self._replace("open", open_number)
        # pathlib calls io.open, and scripts call the builtin. Neither calls os.open.
        builtins.open = io.open = open_file

    def _replace(self, name: str, function: Any) -> None:
        original = getattr(os, name)
        # Libraries ask whether a function is in these sets, as shutil does for os.stat in os.supports_follow_symlinks.
        for supporting in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if original in supporting:
                supporting.add(function)
        setattr(os, name, function)

    def placed(self, path: object) -> str | None:
        """Return where ``path`` is placed; ``None`` if it is not."""
        # Looked up and not imported: until the script imports torchhooks, nothing is placed by it in this process.
        files = sys.modules.get("torchhooks.common.files")
        folders = self._folders if files is None else self._folders | files.placed
        if not folders or not isinstance(path, (str, os.PathLike)):
            return None
        text = os.fspath(path)
        if not isinstance(text, str):
            return None
        whole = os.path.abspath(text)
        if whole.startswith(self._inside):
            return None
        # A folder that the script runs in has much that is not of the training run.
        within = [folder for folder in folders if _is_in(whole, folder) and not _is_in(os.getcwd(), folder)]
        return self._inside + whole.lstrip(os.sep) if within else None

    def to_read(self, path: Any) -> Any:
        """Return where to look for ``path``: what is not of a training run may lie in its folder without ``check``."""
        placed = self.placed(path)
        if placed is None or self._exists(placed):
            return placed or path
        return placed if _OF_TRAINING.fullmatch(os.path.basename(os.path.abspath(path))) else path

    def to_write(self, path: Any) -> Any:
        placed = self.placed(path)
        if placed is None:
            return path
        missing, folder = [], os.path.dirname(placed)
        while not self._exists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        # The script sees that the folder is there without check. So a write must not fail because the scratch folder
        # does not have it yet.
        if missing and self._exists(os.path.dirname(os.path.abspath(path))):
            for each in reversed(missing):
                self._mkdir(each)
        return placed

    def listing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(path: Any = ".") -> Any:
            placed = self.placed(path)
            if placed is not None and self._exists(placed):
                return function(placed)
            listed = function(path)
            if placed is None:
                return listed
            if isinstance(listed, list):
                return [name for name in listed if not _OF_TRAINING.fullmatch(name)]
            return _Entries(listed)

        return call


def moved(function: Callable[..., Any], **moves: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return ``function`` with some of its first parameters changed, ``path=to_read`` for example."""

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if any(name.endswith("dir_fd") and each is not None for name, each in keywords.items()):
            return function(*args, **keywords)  # relative to an open folder, which was moved when it was opened
        paths = [move(path) for move, path in zip(moves.values(), args, strict=False)]
        named = {name: moves[name](each) if name in moves else each for name, each in keywords.items()}
        return function(*paths, *args[len(paths) :], **named)

    return call


def _is_in(path: str, folder: str) -> bool:
    return os.path.join(path, "").startswith(os.path.join(folder, ""))


class _Entries:
    """What ``os.scandir`` returns, without what is of a training run that was made without ``check``."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries
        self.close = entries.close

    def __iter__(self) -> Iterator[Any]:
        return (entry for entry in self._entries if not _OF_TRAINING.fullmatch(entry.name))

    def __next__(self) -> Any:
        return next(iter(self))

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unless_missing(stat: Callable[[str], object]) -> Callable[[str], bool]:
    def exists(path: str) -> bool:
        try:
            stat(path)
        except OSError:
            return False
        return True

    return exists


if __name__ == "__main__":
    # The script takes the place of this file as the main module. torchhooks, which imports it by its name, must find
    # this module with what prepare() has set, and not make a second one.
    sys.modules["torchhooks.tools.ledger.as_main"] = sys.modules["__main__"]
    # The value of CHECK_PLAN, which cannot be imported here.
    with open(os.environ["TORCHHOOKS_CHECK"], encoding="utf-8") as plan_file:
        prepare(json.load(plan_file))
    sys.exit(run(sys.argv[1:]))

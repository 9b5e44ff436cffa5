"""The commands ``status``, ``stop`` and ``mirror`` of ``python -m torchhooks``."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from torchhooks.elsewhere.copy import Copy
from torchhooks.elsewhere.curves import Point
from torchhooks.elsewhere.status import Status, Watcher, ago, lines_of, state_of
from torchhooks.elsewhere.store import Secrets, Store, is_url
from torchhooks.lifecycle.run_record import STOP_NAME, read_record

_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_POLL_SECS = 0.2
_COPY_SECS = 120.0  # how old a copy may be, with the time that the upload takes


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers ``commands`` of ``python -m torchhooks``."""
    command = commands.add_parser("status", help="say how far a training run is, how fast, and whether it is alive")
    command.add_argument("path", help="the folder of the training run, or the address of its copy")
    command.add_argument("--watch", action="store_true", help="show it as a table with small curves, until Ctrl-C")
    command.set_defaults(call=lambda given: watch(given.path) if given.watch else status(given.path))
    command = commands.add_parser("stop", help="ask a training run to save a checkpoint and stop after its run")
    command.add_argument("path", help="the folder of the training run")
    command.add_argument(
        "--wait", metavar="SECS", type=float, default=60.0, help="how long to wait until it has stopped; default 60"
    )
    command.set_defaults(call=lambda given: stop(given.path, given.wait))
    command = commands.add_parser("mirror", help="copy a training run to a store such as S3, or from it")
    command.add_argument("source", help="the folder of the training run, or the address of its copy")
    command.add_argument("target", help="the address of the copy, or the folder")
    command.set_defaults(call=lambda given: mirror(given.source, given.target))


def status(path: str) -> int:
    """Print the status of the training run in ``path``. Return 0, or 1 if it was killed or has failed."""
    if is_url(path):
        with tempfile.TemporaryDirectory() as folder:
            if (code := _fetch(path, lambda: Copy(folder, Store(path)).outline())) != 0:
                return code
            found = Watcher(folder, _COPY_SECS).look()
    else:
        found = Watcher(path).look()
    lines = list(lines_of(found))
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(f"{name:{width}}  {text}")
    return 0 if found.is_alive or (found.record is not None and _ended_well(found)) else 1


def _ended_well(found: Status) -> bool:
    return found.record is not None and found.record.stopped is not None and not found.record.failed


def stop(path: str, wait_secs: float) -> int:
    """Ask the training run in the folder ``path`` to stop, and wait for it. Return 0 if it has, 1 if not."""
    record = read_record(path)
    state, is_alive = state_of(record)
    if record is None or not is_alive:
        print(f"{path}: nothing trains here that could stop: {state}", file=sys.stderr)
        return 1
    request = os.path.join(path, STOP_NAME)
    with open(request, "w", encoding="utf-8"):
        pass
    print(f"{path}: asked to stop, at step {record.step}, {ago(record.time)}")
    end = time.monotonic() + wait_secs
    while time.monotonic() < end:
        record = read_record(path)
        if record is not None and record.stopped is not None:
            if os.path.exists(request):  # it has stopped before it looked
                os.remove(request)
            print(f"{path}: stopped at step {record.step} by {record.stopped}")
            return 0
        time.sleep(_POLL_SECS)
    taken = "it has taken the request" if not os.path.exists(request) else "it has not taken the request yet"
    print(f"{path}: still running after {wait_secs:g} s; {taken}", file=sys.stderr)
    return 1


def mirror(source: str, target: str) -> int:
    """Copy the newest checkpoints and the other files of a training run to a store, or from it. Return 0, or 1."""
    if is_url(source) == is_url(target) or (is_url(target) and not os.path.isdir(source)):
        print("give a folder of this machine and an address, such as run s3://bucket/run-17", file=sys.stderr)
        return 1
    folder, url = (target, source) if is_url(source) else (source, target)

    def copy() -> None:
        kept = Copy(folder, Store(url))
        copied = kept.pull() if is_url(source) else kept.push()
        what = ", ".join(copied) if copied else "no newer checkpoint"
        print(Secrets(url).hide(f"{source} was copied to {target}: {what}"))

    return _fetch(url, copy)


def _fetch(url: str, call: Callable[[], object]) -> int:
    """Return 0 after ``call()``, or 1 after an error of the store ``url``, which is printed without credentials."""
    try:
        call()
    except Exception as error:
        print(Secrets(url).hide(f"{url}: {type(error).__name__}: {error}"), file=sys.stderr)
        return 1
    return 0


def watch(path: str, period_secs: float = 2.0) -> int:
    """Show the status of the training run in the folder ``path`` as a table, again and again, until Ctrl-C."""
    try:
        live = importlib.import_module("rich.live")
    except ImportError as error:
        raise ImportError("rich cannot be imported: pip install torchhooks[status], or pip install rich") from error
    watcher = Watcher(path)
    try:
        with live.Live(table(path, watcher.look()), auto_refresh=False) as screen:
            while True:
                time.sleep(period_secs)
                screen.update(table(path, watcher.look()), refresh=True)
    except KeyboardInterrupt:
        return 0


def table(path: str, found: Status) -> Any:
    """Return a table of rich with the status of the training run in ``path``, and a small curve of each tag."""
    rich_table, text = importlib.import_module("rich.table"), importlib.import_module("rich.text")
    shown = rich_table.Table(title=text.Text(path), box=None, show_header=False, pad_edge=False)
    shown.add_column(no_wrap=True, style="bold", max_width=24)
    shown.add_column(overflow="fold")
    for name, line in lines_of(found):
        curve = bars(found.curves[name]) + "  " if name in found.curves else ""
        shown.add_row(text.Text(name), text.Text(curve + line))
    return shown


def bars(points: list[Point], width: int = 24) -> str:
    """Return the last points of a curve as ``width`` small bars, from their least to their greatest value."""
    values = [point.value for point in points[-width:]]
    finite = [value for value in values if abs(value) < float("inf")]  # false for NaN
    least, greatest = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (greatest - least) if greatest > least else 0.0
    shown = (_BARS[round((value - least) * scale)] if abs(value) < float("inf") else "!" for value in values)
    return "".join(shown).ljust(width)

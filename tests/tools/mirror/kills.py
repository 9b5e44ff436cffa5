"""Kill mirrored training runs at drawn moments: ``python tests/tools/mirror/kills.py 200`` prints what became of them.

Each trial is a training run that is killed up to three times, each time at a drawn moment, and continues on the same
machine or on an empty one. Half of the copies are in a folder, and half on an S3 server. In a third of the trials the
store is slower than the saves. What has to hold:

* the last process ends with the same bits as a training run that nothing happened to;
* a process begins at the newest checkpoint that was whole in the copy, or at a later one of the folder;
* the copy loses no whole checkpoint that newer whole ones have not replaced.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support import processes
from support.copies import FolderPlace, S3Place
from support.proxy import Answer, Fault, Proxy
from support.s3 import S3Server

import torchhooks.tools.mirror.copy
import torchhooks.tools.mirror.hook
import torchhooks.tools.mirror.layout
from torchhooks import CheckpointSaverHook, MirrorHook, MonitoredLoop, Saver, StopAtStepHook, list_checkpoints
from torchhooks.tools.mirror.layout import CopyContents, MirroredCheckpoint
from torchhooks.tools.mirror.store import Store

STEPS, EVERY, KEPT = 40, 2, 2
LONGEST_SECS = 1.5  # until a kill
SLOW_SECS = 0.15  # for the data of a checkpoint, in which several are saved


def train(result: str, folder: str, url: str, options: Mapping[str, Any], slow_secs: float = 0.0) -> None:
    """Train to the last step, and write where it began and a hash of the weights into the file ``result``."""
    torchhooks.tools.mirror.copy.LOOK_SECS = torchhooks.tools.mirror.hook.FIRST_PAUSE_SECS = 0.01
    torchhooks.tools.mirror.layout.PAUSES_SECS = (0.1, 0.1, 0.1)
    if slow_secs:  # a folder has no wire
        copy_file = shutil.copyfile

        def copy_slowly(path: str, new_path: str) -> None:
            time.sleep(slow_secs * path.endswith("state.pt"))
            copy_file(path, new_path)

        shutil.copyfile = copy_slowly  # type: ignore[assignment]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batches = list(torch.randn(STEPS, 8, 4))

    def step(inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)  # what the step takes
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    hooks = [
        StopAtStepHook(last_step=STEPS),
        CheckpointSaverHook(folder, save_steps=EVERY, saver=Saver(max_to_keep=KEPT)),
        MirrorHook(folder, url, storage_options=options, every_n_secs=0.1),
    ]
    with MonitoredLoop(step, model, optimizer, hooks=hooks, checkpoint_dir=folder) as loop:
        Path(f"{result}.begun").write_text(str(loop.global_step))
        for inputs in loop.until_stop(batches):
            loop.run(inputs)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    Path(result).write_text(hashlib.sha256(weights).hexdigest())


def whole_in(place: FolderPlace, options: Mapping[str, Any]) -> list[MirroredCheckpoint]:
    """Return the checkpoints in the copy that can be restored, oldest first."""
    store = Store(place.url, options)
    found = CopyContents(store, store.list())
    return sorted(found.whole.values(), key=lambda entry: entry.age)


def trial(number: int, place: FolderPlace, options: Mapping[str, Any], is_slow: bool, folder: Path) -> tuple[str, int]:
    """Return the hash of the weights after some kills, and how many there were; raise AssertionError for a loss."""
    drawn = random.Random(number)
    wanted = drawn.randint(1, 3)
    machine = kills = 0
    before: list[MirroredCheckpoint] = []
    while True:
        run = folder / f"machine-{machine}"
        here = [checkpoint.step for checkpoint in list_checkpoints(run)]
        result = folder / f"result-{machine}-{kills}"
        slow_secs = SLOW_SECS if is_slow and not isinstance(place, S3Place) else 0.0
        process = processes.start(
            *(folder / "output", train, str(result), str(run), place.url, place.options, slow_secs)
        )
        process.join(drawn.uniform(0.0, LONGEST_SECS) if kills < wanted else None)
        if process.exitcode is None:
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
        begun = Path(f"{result}.begun")
        if begun.exists() and begun.read_text():
            newest = max([*here, *(entry.step for entry in before[-1:])], default=0)
            assert int(begun.read_text()) >= newest, f"began at {begun.read_text()}, and not at {newest}"
        after = whole_in(place, options)
        lost = {entry.place for entry in before} - {entry.place for entry in after}
        for entry in before:
            newer = sum(other.age > entry.age for other in after)
            assert entry.place not in lost or newer >= KEPT, f"{entry.place} was lost, with {newer} newer ones"
        before = after
        if process.exitcode == 0:
            return result.read_text(), kills
        assert process.exitcode == -signal.SIGKILL, (folder / "output").read_text()
        kills += 1
        machine += drawn.random() < 0.5  # an empty one


@contextmanager
def place_for(kind: str, is_slow: bool, server: S3Server, folder: Path) -> Iterator[tuple[FolderPlace, dict[str, Any]]]:
    if kind == "file":
        place = FolderPlace(folder / "store")
        yield place, {}
        return
    proxy = Proxy(server.options["endpoint_url"])

    def slow(ask: Any) -> Answer:
        time.sleep(SLOW_SECS)
        answer: Answer = ask()
        return answer

    def fault(method: str, path: str) -> Fault | None:
        return slow if is_slow and method == "PUT" and path.endswith("state.pt") else None

    proxy.fault = fault
    yield S3Place(server, proxy), server.options
    proxy.stop()


def kill_many(number: int, server: S3Server, at_once: int = 1) -> Counter[str]:
    """Make trials until there were ``number`` kills; return how many trials and kills there were of each kind."""
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(at_once) as pool:
        whole = Path(temporary, "whole")
        whole.mkdir()
        ended = processes.call(train, str(whole / "result"), str(whole / "run"), (whole / "store").as_uri(), {})
        assert ended.code == 0, ended.output
        expected = (whole / "result").read_text()

        def make(index: int) -> None:
            kind, is_slow = ("file", "s3")[index % 2], index % 3 == 0
            name = f"{kind}, slow" if is_slow else kind
            folder = Path(temporary, str(index))
            folder.mkdir()
            with place_for(kind, is_slow, server, folder) as (place, options):
                weights, kills = trial(index, place, options, is_slow, folder)
            assert weights == expected, f"trial {index} ({name}) ended with other weights"
            counted.update({f"trials, {name}": 1, f"kills, {name}": kills, "kills": kills})
            shutil.rmtree(folder)

        index = 0
        while counted["kills"] < number:
            list(pool.map(make, range(index, index + at_once)))
            index += at_once
    return counted


if __name__ == "__main__":
    began = time.monotonic()
    s3 = S3Server()
    try:
        for name, count in sorted(kill_many(int(sys.argv[1]), s3, at_once=2).items()):
            print(f"{name}: {count}")
    finally:
        s3.stop()
    print(f"same bits in all trials, and no whole checkpoint was lost; {time.monotonic() - began:.0f} s")

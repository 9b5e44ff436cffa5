"""A signal to the whole process group, which also ends the workers of a DataLoader, stops the loop cleanly.

That is what Ctrl-C in a terminal, systemd and batch systems send.
"""

import os
import signal
from pathlib import Path

import pytest
from support.processes import Process, start_program
from support.waiting import wait_until

from torchhooks import latest_checkpoint

PROGRAM = """
    import hashlib, multiprocessing, os, signal, sys, threading, time, traceback
    import torch
    from torchhooks import CheckpointSaverHook, MonitoredLoop

    folder, where = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores SIGINT

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            self.given = getattr(self, "given", 0) + 1
            if where == "data" and torch.utils.data.get_worker_info().id == 1 and self.given > 4:
                time.sleep(600)  # in the third batch of this worker, which is the sixth of all
            return torch.full((3,), float(index)) + torch.rand(3)

    torch.manual_seed(3)
    made = []
    model = torch.nn.Linear(3, 1)

    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        made.append(float(loss))
        if where == "step" and len(made) == 4:
            print("ready", flush=True)
            while not loop.session.interrupted:
                time.sleep(0.01)
            for worker in multiprocessing.active_children():
                # WNOWAIT, because torch's handler of SIGCHLD, which would raise here, has to find the worker's status.
                os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-4 * parameter.grad
                parameter.grad = None
        if where == "data" and len(made) == 5:
            threading.Thread(target=wait_for_the_data, daemon=True).start()

    def wait_for_the_data():
        main = threading.main_thread().ident
        while "_try_get_data" not in {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}:
            time.sleep(0.01)
        print("ready", flush=True)

    # Python 3.14 would start a server, which cannot import this program.
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = torch.utils.data.DataLoader(Samples(), batch_size=2, shuffle=True, **workers)
    saver = CheckpointSaverHook(folder, save_steps=1000)
    with MonitoredLoop(
        step, model, hooks=[saver], checkpoint_dir=folder, signals=["SIGTERM", "SIGINT"]
    ) as loop:
        for epoch in loop.until_stop(range(2)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                torch.rand(1)
        print("the end of the data", flush=True)
    values = torch.cat([parameter.flatten() for parameter in [*model.parameters(), torch.rand(2)]])
    print("values", hashlib.sha256(values.detach().numpy().tobytes()).hexdigest())
"""


def start(folder: Path, where: str = "nowhere") -> Process:
    """Start the program in a process group of its own, which is signalled in its step or while it waits for data."""
    output, errors = folder.with_suffix(".out"), folder.with_suffix(".err")
    return start_program(PROGRAM, str(folder), where, output=output, errors=errors, new_session=True)


def ended(process: Process, code: int) -> tuple[str, str]:
    """Wait until the process has ended with ``code``, and return what it printed, and what it logged."""
    process.join()
    out, errors = process.output.read_text(), process.output.with_suffix(".err").read_text()
    assert process.exitcode == code, errors
    return out, errors


def values_of(process: Process) -> str:
    return ended(process, 0)[0].splitlines()[-1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    return values_of(start(tmp_path_factory.mktemp("uninterrupted")))


@pytest.mark.parametrize(
    ("number", "where"),
    [
        pytest.param(signal.SIGINT, "step", marks=pytest.mark.exhaustive),
        (signal.SIGTERM, "data"),
        pytest.param(signal.SIGINT, "data", marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGTERM, "step", marks=pytest.mark.exhaustive),
    ],
)
def test_the_state_is_saved_and_resumed_exactly(
    number: signal.Signals, where: str, tmp_path: Path, uninterrupted: str
) -> None:
    process = start(tmp_path, where)
    wait_until(lambda: process.output.read_text().startswith("ready\n"))
    os.killpg(process.pid, number)
    out, errors = ended(process, -number)
    assert "the end of the data" not in out
    assert f"stopped by signal {number.name} at step" in errors
    assert latest_checkpoint(tmp_path) == str(tmp_path / f"model.ckpt-{4 if where == 'step' else 5}")
    assert values_of(start(tmp_path)) == uninterrupted

"""A training run of several ranks that is killed and resumed, called by tests in processes or run under torchrun."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from support.disks import DiskOfMoments, Moment, copy_folder, killing_at
from torchhooks import CheckpointSaverHook, MonitoredLoop, Ranks, Saver

EPOCHS, ITEMS = 3, 12


class FolderCache:
    """The items that this rank trained on."""

    per_rank = True

    def __init__(self) -> None:
        self.items: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"items": list(self.items)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.items = list(state["items"])


def train(
    rank: int,
    folder: str,
    async_save: bool = False,
    sharded: bool = False,
    copied: Sequence[Moment] = (),
    kill_at: Moment | None = None,
) -> dict[str, Any]:
    """Train to the end, from the newest checkpoint in ``folder``, and return all that has to be the same bits.

    Args:
        rank: the rank of this process.
        folder: where the checkpoints are.
        async_save: whether to save in the background.
        sharded: whether the model is sharded. Then the gradients of three steps accumulate, of the first one without a
            reduction over the ranks.
        copied: the moments of a save in which the chief copies the folder, as a kill would leave it: to
            ``f"{folder}-{place}"``, by the place in the list.
        kill_at: the moment of a save in which all ranks are killed.
    """
    torch.manual_seed(rank)
    random.seed(rank)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2), nn.BatchNorm1d(2))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, 0)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data: Any = range(rank * 100, rank * 100 + ITEMS)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    seen, attempt = FolderCache(), os.environ.get("TORCHELASTIC_RESTART_COUNT")

    def step(batch: torch.Tensor) -> Any:
        number = loop.global_step % 3
        if sharded:
            model.set_requires_gradient_sync(number > 0)
        if number == 0 or not sharded:
            optimizer.zero_grad()
        inputs = batch.float().unsqueeze(1).expand(-1, 4) / 100 + random.random()
        loss = model(inputs).square().mean()
        loss.backward()
        if number == 2 or not sharded:
            optimizer.step()
        seen.items += batch.tolist()
        return loss.item()

    def reached(moment: Moment) -> None:
        if moment in copied:
            copy_folder(folder, f"{folder}-{copied.index(moment)}")

    pids: list[int] = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(pids, os.getpid())
    saver = Saver(3, async_save=async_save)
    if rank == 0:
        saver.disk = DiskOfMoments(reached if kill_at is None else killing_at(kill_at, pids[::-1]))
    hook = CheckpointSaverHook(folder, save_steps=2, saver=saver)
    with MonitoredLoop(
        *(step, model, optimizer),
        hooks=[hook],
        state={"seen": seen},
        checkpoint_dir=folder,
        ranks=Ranks(tick_secs=0.02),
    ) as loop:
        for _epoch in loop.until_stop(range(EPOCHS)):
            for batch in loop.until_stop(loader):
                loop.run(batch)
                if os.environ.get("DIES_AT") == f"{rank} {loop.global_step} {attempt}":
                    os.kill(os.getpid(), signal.SIGKILL)
    return {
        "step": loop.global_step,
        "seen": seen.items,
        "weights": [_plain(parameter) for parameter in model.parameters()],
        "buffers": [_plain(buffer) for buffer in model.buffers()],  # which FSDP2 never makes the same on all ranks
        "moments": [_plain(each["exp_avg"]) for each in optimizer.state.values()],
        "random": (hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest(), random.random()),
    }


def train_in_each(rank: int, folders: list[str], *arguments: Any) -> list[dict[str, Any]]:
    """Train in each of the folders, one after the other, and return the results."""
    return [train(rank, folder, *arguments) for folder in folders]


def _plain(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()


def train_until_a_signal(rank: int, folder: str) -> dict[str, Any]:
    """Train until SIGTERM, and note in a file that training has begun."""

    def step() -> None:
        torch.distributed.all_reduce(torch.ones(1))
        time.sleep(0.005 * (1 + rank))

    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    hook = CheckpointSaverHook(f"{folder}/run", save_secs=600)
    with MonitoredLoop(step, model, hooks=[hook], checkpoint_dir=f"{folder}/run", signals=["SIGTERM"]) as loop:
        while not loop.should_stop():
            loop.run()
            if loop.global_step == 5:
                Path(folder, f"begun-{rank}").touch()
        # Written here, because the process ends when the signal is delivered as the loop closes.
        Path(folder, f"stopped-{rank}").write_text(f"{loop.global_step} {loop.stop_reason}")
    return {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    own_rank = torch.distributed.get_rank()
    way, directory = sys.argv[1:]
    result = train_until_a_signal(own_rank, directory) if way == "signal" else train(own_rank, f"{directory}/run")
    Path(directory, f"result-{own_rank}").write_text(repr(result))
    torch.distributed.destroy_process_group()

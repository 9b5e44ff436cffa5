"""The training script of gpt.py without torchhooks: what its hooks do is written by hand.

    python examples/gpt_plain.py
    torchrun --standalone --nproc-per-node 2 examples/gpt_plain.py

The trained models are bit-identical, also after an interruption. The model and the data are the same lines in
both files.
"""

import argparse
import contextlib
import math
import os
import signal
import time
from collections.abc import Sequence
from pydoc_data.topics import topics
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm

BLOCK, WIDTH, HEADS, LAYERS, DROPOUT = 64, 64, 4, 3, 0.1
BATCH, ACCUMULATE = 8, 2  # blocks at a time in each process, and how many times of them are in a step
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
GPU = int(os.environ.get("LOCAL_RANK", 0)) if torch.cuda.is_available() else None
DEVICE = torch.device("cpu" if GPU is None else f"cuda:{GPU}")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.projection(attended.transpose(1, 2).flatten(2)))
        y: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting ``targets``, the byte that follows each of ``tokens``."""
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = self.layers(self.token(tokens) + self.place.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return blocks of bytes and the bytes that follow each of them, for training and for validation, 19 to 1."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long().to(DEVICE)
    blocks = (len(text) - 1) // BLOCK
    inputs, targets = (text[i : i + blocks * BLOCK].view(blocks, BLOCK) for i in (0, 1))
    split = blocks * 19 // 20
    return TensorDataset(inputs[:split], targets[:split]), TensorDataset(inputs[split:], targets[split:])


def save(path: str, state: dict[str, Any]) -> None:
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)  # atomic, so a process that is killed leaves the previous file intact


def random_state() -> list[Tensor]:
    return [torch.get_rng_state()] if GPU is None else [torch.get_rng_state(), torch.cuda.get_rng_state()]


def set_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if GPU is not None:
        torch.cuda.set_rng_state(states[1])


def on_any_rank(condition: bool) -> bool:
    """Return whether ``condition`` is true on any rank. Every rank has to call this, and waits for the others."""
    if RANKS == 1:
        return condition
    answer = torch.tensor(float(condition), device=DEVICE)
    torch.distributed.all_reduce(answer)
    return bool(answer > 0)


def train(steps: int, every: int, folder: str) -> None:
    torch.manual_seed(0)
    model = GPT().to(DEVICE)
    parallel = nn.parallel.DistributedDataParallel(model, None if GPU is None else [GPU]) if RANKS > 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def rate(step: int) -> float:  # warms up, then falls along half a cosine
        return min(10 * (step + 1) / steps, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    data, validation_data = load_data()
    sampler = DistributedSampler[int](data, RANKS, RANK)
    loader = DataLoader(data, BATCH * ACCUMULATE, sampler=sampler, drop_last=True)
    torch.manual_seed(RANK)  # each rank has dropout of its own

    def validation_loss(model: GPT) -> Tensor:
        parts = zip(*(tensor.chunk(10) for tensor in validation_data.tensors), strict=True)
        return torch.stack([model(*part) for part in parts]).mean()

    tokens = BATCH * ACCUMULATE * BLOCK * RANKS
    # What a resumed process needs in addition to the model, the optimizer and the scheduler.
    progress: dict[str, Any] = {"step": 0, "epoch": 0, "batch": 0, "losses": 0.0, "summed": 0}
    progress |= {"best": math.inf, "best_step": 0}
    path, random = f"{folder}/checkpoint.pt", None
    if os.path.exists(path):
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        progress, random = saved["progress"], saved["random"]
        print(f"restored step {progress['step']} from {path}")

    signals: list[int] = []

    def remember(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and signals:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait for the end of the step
        signals.append(signum)

    def state() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "progress": progress,
            "random": random_state(),
        }

    handlers = {signum: signal.signal(signum, remember) for signum in (signal.SIGTERM, signal.SIGINT)}
    # Curves are purged beyond the restored step, because the interrupted process may have written those points already.
    writer = SummaryWriter(folder, purge_step=progress["step"] + 1) if RANK == 0 else None
    bar = tqdm(total=steps, initial=progress["step"], unit="step", disable=None if RANK == 0 else True)
    since, counted, paused, stop_reason = time.monotonic(), -1, 0.0, "data ended"
    stopping = progress["step"] >= steps
    while progress["epoch"] < steps and not stopping:
        sampler.set_epoch(progress["epoch"])
        if random is not None and progress["batch"] == 0:
            set_random_state(random)  # before the iterator of the loader draws its seed
            random = None
        batches = iter(loader)
        for _ in range(progress["batch"]):
            next(batches)
        if random is not None:
            set_random_state(random)  # after it has drawn it
            random = None
        for batch in batches:
            optimizer.zero_grad()
            step_loss = torch.zeros((), device=DEVICE)
            for i, part in enumerate(zip(*(tensor.chunk(ACCUMULATE) for tensor in batch), strict=True)):
                with contextlib.nullcontext() if not parallel or i == ACCUMULATE - 1 else parallel.no_sync():
                    loss = (parallel or model)(*part) / ACCUMULATE
                    loss.backward()
                step_loss += loss.detach()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

            progress["step"] += 1
            progress["batch"] += 1
            if progress["batch"] == len(loader):
                progress["epoch"], progress["batch"] = progress["epoch"] + 1, 0
            step = progress["step"]
            bar.update()

            # Curves and the values in the bar. On a GPU, item() waits, so it is not called in every step.
            progress["losses"] = progress["losses"] + step_loss.double()
            progress["summed"] += 1
            if step % 10 == 1 and writer is not None:
                lr = scheduler.get_last_lr()[0]
                bar.set_postfix(loss=step_loss.item(), lr=lr)
                writer.add_scalar("loss", progress["losses"].item() / progress["summed"], step)
                writer.add_scalar("lr", lr, step)
                writer.add_scalar("grad_norm", grad_norm.item(), step)
                progress["losses"], progress["summed"] = 0.0, 0

            # Rates, without the first step, evaluations and checkpoints.
            if counted < 0 or step - counted >= 20:
                if GPU is not None:
                    torch.cuda.synchronize()
                now = time.monotonic()
                if counted >= 0 and writer is not None:
                    steps_per_sec = (step - counted) / (now - since - paused)
                    rates = {"global_step/sec": steps_per_sec, "tokens/sec": tokens * steps_per_sec}
                    for tag, value in rates.items():
                        writer.add_scalar(tag, value, step)
                    tqdm.write(f"step {step}: " + ", ".join(f"{tag} {value:.4g}" for tag, value in rates.items()))
                since, counted, paused = now, step, 0.0

            # Evaluation, the best checkpoint, early stopping and the regular checkpoint.
            pause = time.monotonic()
            wants_to_stop = bool(signals) or step >= steps
            if signals:
                stop_reason = f"signal {signal.Signals(signals[0]).name}"
            elif step >= steps:
                stop_reason = f"step {step}"
            if step % every == 0 and RANK == 0:
                model.eval()
                with torch.no_grad():
                    validation = validation_loss(model).item()
                model.train()
                tqdm.write(f"evaluation at step {step}: {validation:.4f}")
                if writer is not None:
                    writer.add_scalar("validation_loss", validation, step)
                if validation < progress["best"]:
                    progress["best"], progress["best_step"] = validation, step
                    save(f"{folder}/best.pt", state())
                elif step - progress["best_step"] >= 3 * every:
                    wants_to_stop, stop_reason = (
                        True,
                        f"no decrease of the validation loss since {progress['best_step']}",
                    )
            stopping = on_any_rank(wants_to_stop)
            if (stopping or step % every == 0) and RANK == 0:
                save(path, state())
            paused += time.monotonic() - pause
            if stopping:
                break

    bar.close()
    if writer is not None:
        writer.close()
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    for received in signals:
        signal.raise_signal(received)
    print(f"Stopped at step {progress['step']} by {stop_reason}.")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's documentation.")
    parser.add_argument("--steps", type=int, default=200, help="steps of the optimizer (default: %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations (default: %(default)s)")
    parser.add_argument("--folder", default="runs/gpt-plain", help="for checkpoints and curves (default: %(default)s)")
    options = parser.parse_args(argv)
    if RANKS > 1:
        torch.distributed.init_process_group("gloo" if GPU is None else "nccl")
    train(**vars(options))


if __name__ == "__main__":
    main()

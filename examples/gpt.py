"""Train a small GPT on the documentation that ships with Python. gpt_plain.py is the same script without torchhooks.

    python examples/gpt.py
    torchrun --standalone --nproc-per-node 2 examples/gpt.py

Takes less than a minute on a CPU. It uses a GPU if there is one. If it is interrupted with Ctrl-C or SIGTERM, the same
command continues where it stopped, and ends with the same bits as without the interruption.
"""

import argparse
import contextlib
import math
import os
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchhooks import (
    BestCheckpointHook,
    EvaluationHook,
    MonitoredTrainingLoop,
    ProgressBarHook,
    Scaffold,
    StepCounterHook,
    StopAtStepHook,
    StopIfNoDecreaseHook,
    running_mean,
)

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

    tokens = BATCH * ACCUMULATE * BLOCK
    evaluation = EvaluationHook(validation_loss, every_n_steps=every, output_dir=folder)
    with MonitoredTrainingLoop(
        model=model,
        optimizer=optimizer,
        state={"scheduler": scheduler},
        checkpoint_dir=folder,
        save_checkpoint_steps=every,
        save_summaries_steps=10,
        scaffold=Scaffold(summary_op={"loss": running_mean("loss"), "lr": "lr", "grad_norm": "grad_norm"}),
        log_step_count_steps=None,  # the StepCounterHook below replaces the default one
        hooks=[
            ProgressBarHook(steps, ["loss", "lr"]),
            StepCounterHook(20, None, folder, tokens_per_step=tokens),
            evaluation,
            StopIfNoDecreaseHook(evaluation["validation_loss"], max_steps_without_decrease=3 * every),
            BestCheckpointHook(folder, evaluation["validation_loss"], every_n_steps=every, mode="min"),
            StopAtStepHook(last_step=steps),
        ],
        signals=["SIGTERM", "SIGINT"],
    ) as loop:
        for epoch in loop.until_stop(range(steps)):
            sampler.set_epoch(epoch)
            for batch in loop.until_stop(loader):
                with loop.step() as outputs:
                    optimizer.zero_grad()
                    outputs["loss"] = torch.zeros((), device=DEVICE)
                    for i, part in enumerate(zip(*(tensor.chunk(ACCUMULATE) for tensor in batch), strict=True)):
                        with contextlib.nullcontext() if not parallel or i == ACCUMULATE - 1 else parallel.no_sync():
                            loss = (parallel or model)(*part) / ACCUMULATE
                            loss.backward()
                        outputs["loss"] += loss.detach()
                    outputs["grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
    print(f"Stopped at step {loop.global_step} by {loop.stop_reason}.")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's documentation.")
    parser.add_argument("--steps", type=int, default=200, help="steps of the optimizer (default: %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations (default: %(default)s)")
    parser.add_argument("--folder", default="runs/gpt", help="for checkpoints and curves (default: %(default)s)")
    options = parser.parse_args(argv)
    if RANKS > 1:
        torch.distributed.init_process_group("gloo" if GPU is None else "nccl")
    train(**vars(options))


if __name__ == "__main__":
    main()

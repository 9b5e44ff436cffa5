"""Train a small convnet on handwritten digits, with logging, TensorBoard curves and a NaN check from torchhooks.

    python examples/digits.py

load_data(), make_model() and the training step contain nothing of torchhooks. make_hooks() lists what happens around
the steps, and train() connects the two. Takes a few seconds on a CPU, and uses a GPU if there is one.
"""

from __future__ import annotations

import argparse
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchhooks import (
    FinalOpsHook,
    LoggingTensorHook,
    MonitoredLoop,
    NanTensorHook,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    summary,
)

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as error:
    raise SystemExit("This example needs the images that come with scikit-learn: pip install scikit-learn") from error

WANTED_ACCURACY = 0.97
BATCH_SIZE = 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1,797 scanned digits of 8x8 pixels as a training set and a test set, split 4 to 1."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # pixels range from 0 to 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=digits.target, random_state=0)
    return (
        TensorDataset(images[train].to(DEVICE), labels[train].to(DEVICE)),
        TensorDataset(images[test].to(DEVICE), labels[test].to(DEVICE)),
    )


def make_model() -> nn.Module:
    """Return a convnet whose layers have names, so that hooks can ask for ``"conv1.weight"``."""
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(1, 32, kernel_size=3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, kernel_size=3, padding=1),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        dropout=nn.Dropout(0.3),
        head=nn.Linear(64 * 4 * 4, 10),
    )
    return nn.Sequential(layers).to(DEVICE)


# A hook can ask for a function. torchhooks fills in its parameters by name: inputs and outputs of the step, the model.
# The function is called only in steps in which a hook asks for it, once for all hooks that do, under torch.no_grad().


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of the batch that is classified correctly."""
    return (logits.argmax(dim=1) == labels).float().mean()


def held_out_accuracy(model: nn.Module, test_images: Tensor, test_labels: Tensor) -> float:
    """Return the fraction of the test images that is classified correctly."""
    return accuracy(model(test_images), test_labels).item()


def make_hooks(steps: int, logdir: str) -> list[SessionRunHook]:
    """Return what happens around the steps: when to stop, what to check, what to log and what to write."""
    return [
        # Stop at this step, even in the middle of an epoch.
        StopAtStepHook(last_step=steps),
        # Check the loss after every step, and raise an error if it is NaN.
        NanTensorHook("loss"),
        # Log a line at steps 100, 200, 300, ...
        LoggingTensorHook(
            {"step": "global_step", "loss": "loss", "accuracy": accuracy, "lr": "lr"},
            every_n_steps=100,
            formatter="step {step:4}: loss {loss:.4f}, accuracy {accuracy:.3f}, lr {lr:.6f}".format_map,
        ),
        # Report steps and images per second, in the log and as curves.
        StepCounterHook(every_n_steps=100, output_dir=logdir, examples_per_step=BATCH_SIZE),
        # Write to TensorBoard every 20 steps. A dict of tag -> value makes curves. "conv1.weight" is a parameter, its
        # ".grad" the gradient, and "head:output" what the layer returned in this step.
        SummarySaverHook(
            every_n_steps=20,
            output_dir=logdir,
            summary_op=[
                {"train/loss": "loss", "train/accuracy": accuracy, "train/lr": "lr"},
                summary.histogram("conv1/weight", "conv1.weight"),
                summary.histogram("conv1/gradient", "conv1.weight.grad"),
                summary.histogram("head/output", "head:output"),
                summary.image("images", lambda images: images[:16]),
            ],
        ),
    ]


def train(steps: int, logdir: str) -> float:
    """Train for ``steps`` steps, write TensorBoard files to ``logdir``, and return the accuracy on the test set."""
    torch.manual_seed(0)
    train_data, test_data = load_data()
    loader = DataLoader(train_data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)

    # An ordinary training step. Hooks can ask for what it returns by name: "loss", "logits".
    def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return {"loss": loss, "logits": logits}

    # Evaluated once, when the loop ends without an error. The dict adds names for the function's other parameters.
    test_images, test_labels = test_data.tensors
    final = FinalOpsHook(held_out_accuracy, {"test_images": test_images, "test_labels": test_labels})

    with MonitoredLoop(step, model, optimizer, hooks=[*make_hooks(steps, logdir), final]) as loop:
        for _epoch in loop.until_stop(itertools.count()):
            for images, labels in loop.until_stop(loader):
                loop.run(images, labels)

    print(f"Stopped by {loop.stop_reason}.")
    return float(final.final_ops_values)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small convnet on scikit-learn's digits.")
    parser.add_argument("--steps", type=int, default=1000, help="number of training steps (default: %(default)s)")
    parser.add_argument("--logdir", help="folder for the TensorBoard files (default: runs/digits-DATE-TIME)")
    options = parser.parse_args(argv)
    logdir = options.logdir or f"runs/digits-{datetime.now():%Y%m%d-%H%M%S}"

    reached = train(options.steps, logdir)
    print(f"Test accuracy: {reached:.4f}")
    print(f"To view the curves: tensorboard --logdir {logdir}")
    if reached <= WANTED_ACCURACY:
        raise SystemExit(
            f"Test accuracy {reached:.4f} is not above {WANTED_ACCURACY}: train for more than --steps {options.steps}"
        )


if __name__ == "__main__":
    main()

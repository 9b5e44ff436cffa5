"""Train a small convnet on real handwritten digits, watched by the hooks of torchhooks.

    python examples/digits.py

The data, the model and the step are what they would be without torchhooks. What is to be logged, saved and checked is
in make_hooks(), and train() puts the two together. Runs on CUDA where there is one, and takes seconds without.
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
    raise SystemExit("This example needs scikit-learn, which brings the images: pip install scikit-learn") from error

WANTED_ACCURACY = 0.97
BATCH_SIZE = 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1,797 scanned digits of 8x8 pixels, a fifth of them kept for the test. They come with scikit-learn."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # a pixel is 0 to 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=digits.target, random_state=0)
    return (
        TensorDataset(images[train].to(DEVICE), labels[train].to(DEVICE)),
        TensorDataset(images[test].to(DEVICE), labels[test].to(DEVICE)),
    )


def make_model() -> nn.Module:
    """A convnet. Its layers have names because hooks ask for them by name: ``"conv1.weight"``."""
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


# Hooks may ask for functions. The parameters of such a function are names: what the step takes and returns, the model.
# It is called only in the steps in which a hook asks for it, once, however many do, and without building a graph.


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of right answers: of the batch, when a hook asks for it."""
    return (logits.argmax(dim=1) == labels).float().mean()


def held_out_accuracy(model: nn.Module, test_images: Tensor, test_labels: Tensor) -> float:
    """The share of right answers on images that the model has not seen."""
    return accuracy(model.eval()(test_images), test_labels).item()


def make_hooks(steps: int, logdir: str) -> list[SessionRunHook]:
    """What is to happen around the steps."""
    return [
        # Ends the loop at this step, wherever in an epoch that is.
        StopAtStepHook(last_step=steps),
        # Looks at the loss of every step, and raises when it is NaN.
        NanTensorHook("loss"),
        # A line of text in the 1st step, the 101st, the 201st.
        LoggingTensorHook(
            {"step": "global_step", "loss": "loss", "accuracy": accuracy, "lr": "lr"},
            every_n_iter=100,
            formatter="step {step:4}: loss {loss:.4f}, accuracy {accuracy:.3f}, lr {lr:.6f}".format_map,
        ),
        # Steps and images per second, as lines and as curves.
        StepCounterHook(every_n_steps=100, output_dir=logdir, examples_per_step=BATCH_SIZE),
        # For TensorBoard: curves as a mapping, tag to what is drawn; histograms of a parameter, its gradient and what a
        # layer put out in this step; the images themselves.
        SummarySaverHook(
            save_steps=20,
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
    """Train for ``steps`` steps, write the TensorBoard log to ``logdir``, return the accuracy on the test images."""
    torch.manual_seed(0)
    train_data, test_data = load_data()
    loader = DataLoader(train_data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)

    # An ordinary training step. What it returns has names, which hooks can ask for.
    def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return {"loss": loss, "logits": logits}

    # Computed once, when the training has ended well. What is not a name yet can be given one.
    test_images, test_labels = test_data.tensors
    final = FinalOpsHook(held_out_accuracy, {"test_images": test_images, "test_labels": test_labels})

    with MonitoredLoop(step, model, optimizer, hooks=[*make_hooks(steps, logdir), final]) as loop:
        for _epoch in loop.until_stop(itertools.count()):
            for images, labels in loop.until_stop(loader):
                loop.run(images, labels)

    print(f"Ended by {loop.stop_reason}.")
    return float(final.final_ops_values)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small convnet on scikit-learn's digits.")
    parser.add_argument("--steps", type=int, default=1000, help="how many steps to train (default: %(default)s)")
    parser.add_argument("--logdir", help="where the TensorBoard log goes (default: runs/digits-DATE-TIME)")
    options = parser.parse_args(argv)
    logdir = options.logdir or f"runs/digits-{datetime.now():%Y%m%d-%H%M%S}"

    reached = train(options.steps, logdir)
    print(f"Test accuracy: {reached:.4f}")
    print(f"The TensorBoard log is in {logdir}; to look at it: tensorboard --logdir {logdir}")
    if reached <= WANTED_ACCURACY:
        raise SystemExit(f"{reached:.4f} is not above {WANTED_ACCURACY}: train for more than --steps {options.steps}")


if __name__ == "__main__":
    main()

"""Train a small convnet on real handwritten digits, with everything that torchhooks watches switched on.

    python examples/digits.py

The model, the data, the step and the loop at the bottom are what they would be without torchhooks. What is to be
logged, saved and checked is in the list of hooks. Runs on CUDA where there is one, and takes seconds without.
"""

from __future__ import annotations

import argparse
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
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1,797 scanned digits of 8x8 pixels, a fifth of them kept for the test. They come with scikit-learn."""
    digits = load_digits()
    split = train_test_split(digits.images, digits.target, test_size=0.2, stratify=digits.target, random_state=0)
    train_images, test_images = (torch.tensor(part, dtype=torch.float32)[:, None] / 16 for part in split[:2])
    train_labels, test_labels = map(torch.tensor, split[2:])
    return (
        TensorDataset(train_images.to(DEVICE), train_labels.to(DEVICE)),
        TensorDataset(test_images.to(DEVICE), test_labels.to(DEVICE)),
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


def train(steps: int, logdir: str) -> float:
    """Train for ``steps`` steps, write the TensorBoard log to ``logdir``, return the accuracy on the test images."""
    torch.manual_seed(0)
    train_data, test_data = load_data()
    loader = DataLoader(train_data, batch_size=64, shuffle=True, drop_last=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    # The step is an ordinary function. What it returns has names, which hooks can ask for.
    def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return {"loss": loss, "logits": logits}

    # A hook may also ask for a function. Its parameters are names too: an output and an input of the step here, the
    # model below. It is called in the steps in which a hook asks for it, once, however many do.
    def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.argmax(dim=1) == labels).float().mean()

    def test_accuracy(model: nn.Module) -> float:
        images, labels = test_data.tensors
        return accuracy(model.eval()(images), labels).item()

    at_the_end = FinalOpsHook(test_accuracy)
    hooks: list[SessionRunHook] = [
        # Ends the loop at this step, wherever in an epoch that is.
        StopAtStepHook(last_step=steps),
        # Looks at the loss of every step, and raises when it is NaN.
        NanTensorHook("loss"),
        # A line of text in the 1st step, the 101st, the 201st: what is logged, under which name.
        LoggingTensorHook({"step": "global_step", "loss": "loss", "accuracy": accuracy, "lr": "lr"}, every_n_iter=100),
        # Steps per second, as a line and as a curve.
        StepCounterHook(every_n_steps=100, output_dir=logdir),
        # Curves for TensorBoard: a mapping is tags and scalars.
        SummarySaverHook(
            save_steps=10,
            output_dir=logdir,
            summary_op={"train/loss": "loss", "train/accuracy": accuracy, "train/lr": "lr"},
        ),
        # What is bigger, or slower to look at, less often: a parameter, its gradient, what a layer put out, pixels.
        SummarySaverHook(
            save_steps=100,
            output_dir=logdir,
            summary_op=[
                summary.histogram("conv1/weight", "conv1.weight"),
                summary.histogram("conv1/gradient", "conv1.weight.grad"),
                summary.histogram("relu2/output", "relu2:output"),
                summary.image("images", lambda images: images[:16]),
            ],
        ),
        # Once, when the training has ended well.
        at_the_end,
    ]

    with MonitoredLoop(step, model, optimizer, hooks=hooks) as loop:
        for _epoch in loop.until_stop(range(steps)):
            for images, labels in loop.until_stop(loader):
                loop.run(images, labels)

    print(f"Ended by {loop.stop_reason}.")
    return float(at_the_end.final_ops_values)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small convnet on scikit-learn's digits.")
    parser.add_argument("--steps", type=int, default=1000, help="how many steps to train (default: %(default)s)")
    parser.add_argument("--logdir", help="where the TensorBoard log goes (default: runs/digits-DATE-TIME)")
    options = parser.parse_args(argv)
    logdir = options.logdir or f"runs/digits-{datetime.now():%Y%m%d-%H%M%S}"

    accuracy = train(options.steps, logdir)
    print(f"Test accuracy: {accuracy:.4f}")
    print(f"The TensorBoard log is in {logdir}; to look at it: tensorboard --logdir {logdir}")
    if accuracy <= WANTED_ACCURACY:
        raise SystemExit(f"Expected a test accuracy above {WANTED_ACCURACY}: more than --steps {options.steps}?")


if __name__ == "__main__":
    main()

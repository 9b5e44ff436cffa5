"""Every example does what its docstring says. digits.py and gpt.py run for fewer steps than by default."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from support import paths
from support.events import read
from support.paths import ROOT
from support.processes import call
from support.rank_processes import Ended, run_ranks
from support.scripts import example

from torchhooks import latest_checkpoint
from torchhooks.testing import log_lines

STEPS = 150


def source(name: str) -> str:
    return (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")


# -- digits.py ------------------------------------------------------------------------------------------------------


class Digits(NamedTuple):
    accuracy: float
    lines: list[str]
    events: Any


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    logdir = tmp_path_factory.mktemp("digits")
    with log_lines() as lines:
        accuracy = example("digits").train(STEPS, str(logdir))
    return Digits(accuracy, [text for _, text in lines], read(logdir))


@pytest.mark.slow
def test_digits_learns_digits(digits: Digits) -> None:
    assert digits.accuracy > 0.9


@pytest.mark.slow
def test_digits_logs_a_line_every_100_steps(digits: Digits) -> None:
    steps = [match[1] for line in digits.lines if (match := re.match(r"step +(\d+): loss .* accuracy .* lr ", line))]
    assert steps == ["100"]


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["train/loss", "train/accuracy", "train/lr"])
def test_digits_writes_curves_that_tensorboard_reads(digits: Digits, tag: str) -> None:
    assert [point.step for point in digits.events.Scalars(tag)] == [*range(20, STEPS, 20)]


@pytest.mark.slow
def test_the_loss_of_digits_falls(digits: Digits) -> None:
    losses = [point.value for point in digits.events.Scalars("train/loss")]
    assert losses[-1] < 0.5 < losses[0]


@pytest.mark.slow
def test_digits_writes_steps_per_second(digits: Digits) -> None:
    assert [point.step for point in digits.events.Scalars("global_step/sec")] == [101]


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["conv1/weight", "conv1/gradient", "head/output"])
def test_digits_writes_histograms(digits: Digits, tag: str) -> None:
    assert [histogram.step for histogram in digits.events.Histograms(tag)] == [*range(20, STEPS, 20)]


@pytest.mark.slow
def test_digits_writes_a_picture_of_16_digits(digits: Digits) -> None:
    assert {(picture.width, picture.height) for picture in digits.events.Images("images")} == {(8 * 8, 2 * 8)}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the order of a sum is not fixed")
def test_digits_gives_the_same_curve_twice(digits: Digits, tmp_path: Path) -> None:
    # As many steps as the fixture: the learning rate schedule depends on the number of steps.
    example("digits").train(STEPS, str(tmp_path))
    losses = [[point.value for point in events.Scalars("train/loss")] for events in (digits.events, read(tmp_path))]
    assert losses[0] == losses[1]


@pytest.fixture
def printed_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What digits.py prints when it trains for 20 steps, which are too few, without ``--logdir``."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"is not above 0\.97: train for more than --steps 20$"):
        example("digits").main(["--steps", "20"])
    return capsys.readouterr().out


@pytest.mark.slow
def test_digits_fails_when_it_has_not_learned_enough(printed_too_early: str) -> None:
    assert "Test accuracy: 0." in printed_too_early


@pytest.mark.slow
def test_digits_says_what_stopped_it(printed_too_early: str) -> None:
    assert "Stopped by StopAtStepHook: step 20.\n" in printed_too_early


@pytest.mark.slow
def test_digits_says_how_to_view_its_curves(printed_too_early: str, tmp_path: Path) -> None:
    logdir = printed_too_early.split("tensorboard --logdir ")[1].strip()
    assert read(tmp_path / logdir).Scalars("train/loss")


@pytest.mark.slow
def test_digits_writes_to_a_folder_that_git_ignores(printed_too_early: str, tmp_path: Path) -> None:
    assert [folder.name for folder in tmp_path.iterdir()] == ["runs"]
    assert "runs/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_digits_without_scikit_learn_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        example("digits")


# -- plain.py and wrapped.py ----------------------------------------------------------------------------------------


def test_wrapping_a_script_changes_at_most_ten_lines() -> None:
    plain, wrapped = (source(name).splitlines() for name in ("plain", "wrapped"))
    diff = list(difflib.unified_diff(plain, wrapped))[2:]
    assert 0 < len([line for line in diff if line[0] in "+-"]) <= 10


def test_the_wrapped_script_ends_with_the_same_bits() -> None:
    plain, wrapped = (example(name).main().state_dict() for name in ("plain", "wrapped"))
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(plain[name], wrapped[name]) for name in plain)


def test_the_wrapped_script_logs_what_the_plain_one_prints(
    capsys: pytest.CaptureFixture[str], lines: list[tuple[str, str]]
) -> None:
    example("plain").main()
    example("wrapped").main()
    printed = [float(line.removeprefix("loss = ")) for line in capsys.readouterr().out.splitlines()]
    assert [float(line.split()[2]) for _, line in lines] == pytest.approx(printed, abs=1e-4)


# -- usual_plain.py and usual.py ------------------------------------------------------------------------------------


class Usual(NamedTuple):
    weights: dict[str, torch.Tensor]
    lines: list[str]  # of the epochs


@pytest.fixture(scope="module")
def usual_scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Usual]:
    """What each of the two scripts trains, and what it prints or logs."""
    usual = {}
    for name in ("usual_plain", "usual"):
        with contextlib.redirect_stdout(io.StringIO()) as printed, log_lines() as logged:
            model = example(name).main(str(tmp_path_factory.mktemp(name)))
        lines = [*printed.getvalue().splitlines(), *(text for _, text in logged)]
        usual[name] = Usual(model.state_dict(), [line for line in lines if line.startswith("epoch ")])
    return usual


def test_the_usual_script_ends_with_the_same_bits(usual_scripts: dict[str, Usual]) -> None:
    plain, wrapped = (usual_scripts[name].weights for name in ("usual_plain", "usual"))
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(plain[name], wrapped[name]) for name in plain)


def test_the_usual_script_reports_the_same_lines(usual_scripts: dict[str, Usual]) -> None:
    assert usual_scripts["usual"].lines == usual_scripts["usual_plain"].lines


def test_the_usual_script_lowers_the_learning_rate_and_stops_early(usual_scripts: dict[str, Usual]) -> None:
    lines = usual_scripts["usual"].lines
    assert len({line.rpartition("lr ")[2] for line in lines}) > 1
    assert len(lines) < example("usual").EPOCHS


# -- ddp.py and fsdp2.py --------------------------------------------------------------------------------------------


def changed(plain: str, wrapped: str) -> list[str]:
    diff = list(difflib.unified_diff(source(plain).splitlines(), source(wrapped).splitlines()))[2:]
    return [line for line in diff if line[0] in "+-"]


def test_wrapping_a_script_for_several_ranks_changes_at_most_twelve_lines() -> None:
    assert 0 < len(changed("ddp_plain", "ddp")) <= 12


def test_the_wrapped_script_asks_for_its_rank_nowhere() -> None:
    assert not re.search(r"rank\(\)|== 0|is_chief", source("ddp"))


def both_scripts(rank: int) -> list[bytes]:
    models = [example(name).main() for name in ("ddp_plain", "ddp")]
    return [b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()) for model in models]


@pytest.fixture(scope="module")
def both_on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return run_ranks(tmp_path_factory.mktemp("ranks"), 2, both_scripts)


@pytest.mark.ranks
def test_the_wrapped_script_for_several_ranks_ends_with_the_same_bits(both_on_two_ranks: list[Ended]) -> None:
    assert [each.code for each in both_on_two_ranks] == [0, 0], both_on_two_ranks
    plain, wrapped = both_on_two_ranks[0].value
    assert plain == wrapped
    assert both_on_two_ranks[1].value == both_on_two_ranks[0].value


@pytest.mark.ranks
def test_the_wrapped_script_for_several_ranks_logs_the_loss_of_all_ranks_once(both_on_two_ranks: list[Ended]) -> None:
    chief, other = (re.findall(r"^INFO:torchhooks:loss = (\S+)", each.output, re.M) for each in both_on_two_ranks)
    assert (len(chief), other) == (4, [])
    assert float(chief[-1]) < float(chief[0])


@pytest.fixture(scope="module")
def printed_by_torchrun() -> str:
    """What fsdp2.py prints on two ranks, with the command that its docstring shows."""
    environment = paths.environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    (shown,) = re.findall(r"^ +torchrun (.*)$", source("fsdp2"), re.MULTILINE)
    command = [sys.executable, "-m", "torch.distributed.run", *shown.split()]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


@pytest.mark.release
@pytest.mark.release
def test_fsdp2_logs_the_norm_of_sharded_gradients_once(printed_by_torchrun: str) -> None:
    logged = re.findall(r"loss = (\S+), gradient norm = (\S+)", printed_by_torchrun)
    assert len(logged) == 3
    assert float(logged[-1][0]) < float(logged[0][0])


@pytest.mark.release
def test_fsdp2_has_the_same_final_values_on_all_ranks(printed_by_torchrun: str) -> None:
    # Not line by line: where output is not buffered, print() writes the newline by itself, and ranks print at once.
    final = re.findall(r"rank (\d): (loss \S+, the first weights have the shape \[64, 1\])", printed_by_torchrun)
    assert sorted(rank for rank, _ in final) == ["0", "1"]
    assert len({text for _, text in final}) == 1


# -- custom_hook.py -------------------------------------------------------------------------------------------------

custom_hook = example("custom_hook")
ITS_TESTS = [value for name, value in vars(custom_hook).items() if name.startswith("test_")]


@pytest.mark.parametrize("its_test", ITS_TESTS, ids=lambda its_test: its_test.__name__)
def test_the_custom_hook_passes_its_own_tests(its_test: Callable[[], None]) -> None:
    its_test()


def test_the_custom_hook_takes_under_20_lines() -> None:
    hook = source("custom_hook").partition("class EarlyStopping")[2].partition("\n\n\n")[0]
    assert len(hook.splitlines()) < 20


def test_the_custom_hook_stops_a_real_training_run(capsys: pytest.CaptureFixture[str]) -> None:
    custom_hook.main()
    assert re.fullmatch(r"\d+ steps, stopped by EarlyStopping: .*\n", capsys.readouterr().out)


# -- resume.py ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def printed_by_resume() -> str:
    """What resume.py prints. It starts three processes."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example("resume").main([])
    return printed.getvalue()


@pytest.mark.release
def test_resume_is_ended_by_sigterm_and_started_again(printed_by_resume: str) -> None:
    assert re.findall("exit code (.*)", printed_by_resume) == ["0", "-15", "0"]


@pytest.mark.release
def test_resume_ends_with_the_same_bits_as_an_uninterrupted_run(printed_by_resume: str) -> None:
    assert (
        "Bit-identical: classes, global_step, model, num_threads, optimizer, parameter_names, position, random, runs, "
        "scheduler.\n" in printed_by_resume
    )


@pytest.mark.release
def test_resume_ends_at_the_same_loss_as_an_uninterrupted_run(printed_by_resume: str) -> None:
    assert len(set(re.findall("loss (.*) at step 300", printed_by_resume))) == 1


def test_resume_fails_when_one_bit_differs() -> None:
    one, other = ({"data": {"rest": [1]}, "model": torch.tensor([zero])} for zero in (0.0, -0.0))
    with pytest.raises(SystemExit, match=r"^NOT identical: model$"):
        example("resume").compare(one, other)


# -- fabric_loop.py and accelerate_loop.py --------------------------------------------------------------------------

each_library = pytest.mark.parametrize("name", ["fabric_loop", "accelerate_loop"])


def interrupted(name: str, folder: str, backward: int, signum: int | None) -> None:
    """Run an example that sends itself a signal before one of its backward passes."""
    warnings.simplefilter("default")  # those of the libraries are theirs
    calls = itertools.count(1)
    original: Any = torch.Tensor.backward

    def interrupting(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if next(calls) == backward and signum is not None:
            os.kill(os.getpid(), signum)
        original(self, *args, **kwargs)

    pytest.MonkeyPatch().setattr(torch.Tensor, "backward", interrupting)
    example(name).main(folder)


def run_to_its_end(name: str, folder: Path) -> str:
    """Run an example in a process of its own, and return what it prints."""
    ended = call(interrupted, name, str(folder), 0, None)
    assert ended.code == 0, ended.output
    return ended.output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of an uninterrupted run of an example."""

    @functools.cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        run_to_its_end(name, folder)
        return folder

    return run


@pytest.mark.release
@each_library
@pytest.mark.parametrize(
    ("backward", "signum"), [(45, signal.SIGKILL), pytest.param(71, signal.SIGTERM, marks=pytest.mark.release)]
)
def test_a_script_with_fabric_or_accelerate_ends_with_the_same_bits_when_it_is_killed(
    name: str, backward: int, signum: int, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    killed = call(interrupted, name, str(tmp_path), backward, signum)
    assert killed.code == -signum, killed.output
    assert re.search(r"restored step [1-9]", run_to_its_end(name, tmp_path))
    resume = example("resume")
    resume.compare(resume.end_of(str(uninterrupted(name))), resume.end_of(str(tmp_path)))


# -- optuna_sweep.py ------------------------------------------------------------------------------------------------


def trials(folder: Path) -> list[tuple[Any, ...]]:
    """Return what Optuna knows of the trials that were finished."""
    import optuna

    states = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{folder}/study.db")
    finished = study.get_trials(states=states)
    return [(trial.params, trial.state.name, trial.values, trial.intermediate_values) for trial in finished]


@pytest.mark.release
def test_the_sweep_prunes_some_trials_and_completes_others(uninterrupted: Callable[[str], Path]) -> None:
    states = [state for _, state, _, _ in trials(uninterrupted("optuna_sweep"))]
    assert len(states) == example("optuna_sweep").TRIALS
    assert states[:3] == ["COMPLETE"] * 3  # the pruner compares with three
    assert set(states) == {"COMPLETE", "PRUNED"}


@pytest.mark.release
@pytest.mark.parametrize(("backward", "number", "step"), [(96 + 50, 1, 40), (4 * 96 + 12, 4, 10)])
def test_a_sweep_continues_the_trial_in_which_it_was_killed(
    backward: int, number: int, step: int, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    killed = call(interrupted, "optuna_sweep", str(tmp_path), backward, signal.SIGKILL)
    assert killed.code == -signal.SIGKILL, killed.output
    assert len(trials(tmp_path)) == number
    output = run_to_its_end("optuna_sweep", tmp_path)
    assert re.findall(r"restored step (\d+) from .*/trial-(\d)/", output) == [(str(step), str(number))]

    whole = uninterrupted("optuna_sweep")
    assert trials(tmp_path) == trials(whole)
    ends = [example("resume").end_of(str(folder / f"trial-{number}")) for folder in (whole, tmp_path)]
    example("resume").compare(*({name: end[name] for name in ("model", "optimizer")} for end in ends))


# -- gpt.py and gpt_plain.py ----------------------------------------------------------------------------------------

EPOCH = 18  # batches of tiny_gpt
CHECKPOINTS = {"gpt": "model.ckpt-30/state.pt", "gpt_plain": "checkpoint.pt"}
each_gpt = pytest.mark.parametrize("name", CHECKPOINTS)
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the order of a sum is not fixed")


def tiny_gpt(name: str) -> ModuleType:
    """Return the example ``name``, with a small model and 20,000 bytes of text."""
    module = example(name)
    vars(module).update(WIDTH=8, LAYERS=1, topics={"all": "".join(module.topics.values())[:20_000]})
    return module


def train_gpt(module: ModuleType, folder: Path, *, every: int = 10) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, several threads take 30 times as long for such small operations
    try:
        module.main(["--folder", str(folder), "--steps", "30", "--every", str(every)])
    finally:
        torch.set_num_threads(threads)


def trained(name: str, folder: Path) -> dict[str, Any]:
    """Return the states in the checkpoint of step 30."""
    saved = torch.load(folder / CHECKPOINTS[name], weights_only=True)
    return {key: saved[key] for key in ("model", "optimizer")}


def step_of(folder: Path) -> int:
    """Return the step of the newest checkpoint in ``folder``, of either script."""
    path = latest_checkpoint(folder)
    saved = torch.load(folder / "checkpoint.pt" if path is None else f"{path}/state.pt", weights_only=True)
    return int(saved["global_step"] if "global_step" in saved else saved["progress"]["step"])


@pytest.fixture(scope="module")
def gpts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of one training run of 30 steps with each of the two scripts."""
    folders = {name: tmp_path_factory.mktemp(name) for name in CHECKPOINTS}
    for name, folder in folders.items():
        train_gpt(tiny_gpt(name), folder)
    return folders


@pytest.fixture
def sigterms() -> Iterator[list[int]]:
    """The SIGTERMs that this process has received."""
    received: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
    yield received
    signal.signal(signal.SIGTERM, previous)


def test_gpt_takes_under_150_lines() -> None:
    assert len(source("gpt").splitlines()) < 150


def test_model_and_data_of_gpt_are_the_same_lines_with_and_without_torchhooks() -> None:
    parts = [re.findall(r"^BLOCK, .*^def load_data.*?\n\n\n", source(name), re.M | re.S) for name in CHECKPOINTS]
    assert parts[0] == parts[1] != []


@pytest.mark.slow
@on_the_cpu
def test_gpt_trains_the_same_bits_with_and_without_torchhooks(gpts: dict[str, Path]) -> None:
    with_hooks, without = (trained(name, folder) for name, folder in gpts.items())
    example("resume").compare(with_hooks, without)  # raises SystemExit if they differ


@pytest.mark.slow
@on_the_cpu
@each_gpt
@pytest.mark.parametrize(
    "step",
    [14, pytest.param(EPOCH, marks=pytest.mark.exhaustive)],
    ids=["middle_of_an_epoch", "end_of_an_epoch"],
)
def test_gpt_ends_with_the_same_bits_when_it_is_interrupted(
    name: str, step: int, gpts: dict[str, Path], sigterms: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny_gpt(name)

    class Interrupted(module.GPT):  # type: ignore[misc, name-defined]
        calls = 0

        def forward(self, *batch: torch.Tensor) -> Any:
            self.calls += self.training
            if self.training and self.calls == step * module.ACCUMULATE:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().forward(*batch)

    with monkeypatch.context() as patch:
        patch.setattr(module, "GPT", Interrupted)
        train_gpt(module, tmp_path)
    assert sigterms == [signal.SIGTERM]
    assert step_of(tmp_path) == step
    train_gpt(module, tmp_path)
    example("resume").compare(trained(name, gpts[name]), trained(name, tmp_path))


@pytest.mark.slow
@each_gpt
def test_gpt_stops_when_the_validation_loss_no_longer_decreases(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, losses = tiny_gpt(name), itertools.count(1.0)

    class Overfitting(module.GPT):  # type: ignore[misc, name-defined]
        def forward(self, *batch: torch.Tensor) -> Any:
            return super().forward(*batch) if self.training else torch.tensor(next(losses))

    monkeypatch.setattr(module, "GPT", Overfitting)
    train_gpt(module, tmp_path, every=2)
    assert "Stopped at step 8 by " in capsys.readouterr().out


@pytest.mark.slow
@each_gpt
@pytest.mark.parametrize("tag", ["loss", "lr", "grad_norm"])
def test_gpt_writes_curves_of_training(name: str, tag: str, gpts: dict[str, Path]) -> None:
    assert [point.step for point in read(gpts[name]).Scalars(tag)] == [1, 11, 21]


@pytest.mark.slow
@each_gpt
@pytest.mark.parametrize("tag", ["tokens/sec"])
def test_gpt_writes_curves_of_its_throughput(name: str, tag: str, gpts: dict[str, Path]) -> None:
    assert [point.step for point in read(gpts[name]).Scalars(tag)] == [21]


@pytest.mark.slow
@each_gpt
def test_the_validation_loss_of_gpt_falls(name: str, gpts: dict[str, Path]) -> None:
    points = read(gpts[name]).Scalars("validation_loss")
    assert [point.step for point in points] == [10, 20, 30]
    assert points[-1].value < points[0].value


@pytest.mark.slow
@each_gpt
def test_gpt_keeps_its_best_state(name: str, gpts: dict[str, Path]) -> None:
    best = gpts[name] / {"gpt": "best/model.1.ckpt-30/state.pt", "gpt_plain": "best.pt"}[name]
    states = torch.load(best, weights_only=True)["model"], trained(name, gpts[name])["model"]
    assert example("resume").same(*states)

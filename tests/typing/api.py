"""A program that uses the public API, with the types that a type checker has to find. It is never run."""

# An import of everything public is part of the test, and some variables are only there for their type.
# ruff: noqa: B905, F403, F405, F841

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, assert_type

import torch

from torchhooks import *
from torchhooks import summary
from torchhooks.testing import FakeClock, RecordingHook, RecordingWriter, Trace, trace


class Outputs(NamedTuple):
    loss: torch.Tensor
    accuracy: float


class Watching(SessionRunHook):
    """Overrides everything that there is."""

    def begin(self) -> None:
        self.timer = SecondOrStepTimer(every_steps=10)
        self.never = NeverTriggerTimer()
        self.every = EverySteps(10)

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self.thread = LooperThread.loop(coord, 60.0, target=self.begin)
        assert_type(self.thread, LooperThread)
        assert_type(session.global_step, int)
        assert_type(session.device, torch.device)
        assert_type(coord.should_stop(), bool)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        assert_type(run_context.session, Session)
        assert_type(run_context.original_args, SessionRunArgs)
        if run_context.stop_requested:
            return None
        return SessionRunArgs({"loss": "loss"}, feed_dict={"scale": 2.0}, options=RunOptions(trace=True))

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        assert_type(run_values.results, Any)  # it has the structure of the fetches
        results: Mapping[str, torch.Tensor] = run_values.results
        assert_type(run_values.options, RunOptions)
        assert_type(run_values.run_metadata, RunMetadata)
        run_context.when_ready(results, self.show)
        run_context.request_stop()
        run_context.request_stop("good enough")

    def end(self, session: Session) -> None:
        assert_type(session.run({"loss": "loss", "twice": [lambda loss: loss * 2, "lr"]}), Any)
        loss: float = session.run("loss")

    def teardown(self) -> None: ...

    def next_due(self) -> Due:
        return self.timer.next_due() if self.timer.last_triggered_step() else Due(step=3, moment=1.0, runs=2, when=bool)

    def sat_out(self, runs: int) -> None: ...

    def show(self, values: Mapping[str, torch.Tensor]) -> None: ...


class Narrowed(SessionRunHook):
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("loss")


class Silent(SessionRunHook):
    def before_run(self, run_context: SessionRunContext) -> None: ...


class Listening(CheckpointSaverListener):
    def after_save(self, session: Session, step: int) -> bool:
        return step > 100


def newest(folder: Path) -> str | None:
    try:
        assert_type([checkpoint.step for checkpoint in list_checkpoints(folder)], list[int])
        assert_type(read_metadata(folder / "model.ckpt-3"), dict[str, Any])
        missing: list[str] = load_weights(folder, model, strict=False).missing_keys
        assert_type(best_checkpoint(folder / "best"), str)
        return latest_checkpoint(folder)
    except (DamagedCheckpointError, CheckpointError):
        return None


class Curves(SummaryWriter):
    """A writer of one's own."""

    def add_scalar(self, tag: str, value: float, step: int) -> None: ...

    def flush(self) -> None: ...


model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler: Stateful = torch.optim.lr_scheduler.StepLR(optimizer, 1)
curves: SummaryWriter = Curves()
curves = RecordingWriter()
curves = JsonLinesWriter(Path("curves.jsonl"))
wandb_writer: SummaryWriter = WandbWriter(Path("run"), project="mnist")
prometheus_writer: SummaryWriter = PrometheusWriter(9400, run="mnist", addr="127.0.0.1")
mlflow_writer: SummaryWriter = MlflowWriter("run", tracking_uri="sqlite:///mlflow.db", experiment="mnist")
norms = StepCounterHook(tokens_per_step="tokens", memory=True, summary_writer=[wandb_writer, curves])
norm_ops = {"grad": grad_norm(), "param": param_norm()}
variables: Stateful = Variables(best=0.5, hidden=None, pickled=["envs"])


def step(inputs: torch.Tensor, targets: torch.Tensor, scale: float = 1.0) -> Outputs:
    loss: torch.Tensor = (model(inputs) - targets).square().mean() * scale
    return Outputs(loss, 0.5)


def init_fn(scaffold: Scaffold, session: Session) -> None:
    session.global_step = 3


def ready_fn(session: Session) -> bool | str:
    return True if session.model is not None else "no model"


def hooks(folder: Path) -> Iterator[SessionRunHook]:
    yield StopAtStepHook(num_steps=5)
    yield StopAtStepHook(last_step=5)
    yield StepCounterHook(100, output_dir=folder)
    yield StepCounterHook(every_n_steps=None, every_n_secs=1.5)
    yield SummarySaverHook(save_steps=1, output_dir=str(folder), summary_op={"loss": "loss"})
    yield SummarySaverHook(save_secs=1.0, summary_writer=curves, summary_op=[summary.histogram("w", "weight")])
    yield LoggingTensorHook(["loss"], every_n_iter=1)
    yield LoggingTensorHook({"mean": running_mean("loss"), "all": [running_sum("loss"), running_max("loss")]}, 10)
    yield LoggingTensorHook({"weighted": running_mean("loss", weight="n", reset="epoch"), "last": latest("g_loss")}, 10)
    yield LoggingTensorHook({"least": running_min("loss")}, every_n_iter=10)
    yield LoggingTensorHook({"loss": over_ranks("loss", "mean")}, every_n_secs=60)
    yield LoggingTensorHook({"loss": lambda loss: loss * 2}, at_end=True, formatter=lambda values: str(values["loss"]))
    yield NanTensorHook("loss", fail_on_nan_loss=False)
    yield FinalOpsHook({"loss": "loss"}, {"scale": 1.0})
    yield FeedFnHook(lambda: {"scale": 2.0})
    yield GlobalStepWaiterHook(0)
    yield CallFnHook(len, every_n_steps=10)
    yield ProgressBarHook(1000, ["loss"])
    yield ProgressBarHook(values={"l": lambda loss: loss * 2}, log_every_secs=5)
    yield ProfilerHook(save_steps=100, output_dir=folder, show_memory=True, runs=3)
    yield CallFnHook(lambda loss, lr: None, timer=EverySteps(10), at_end=True)
    evaluation = EvaluationHook(lambda model: 0.5, every_n_steps=10, output_dir=folder)
    assert_type(evaluation.values, dict[str, float])
    yield evaluation
    yield StopIfNoDecreaseHook(evaluation["loss"], 100)
    yield StopIfNoIncreaseHook(evaluation["accuracy"], max_steps_without_increase=100, min_steps=5)
    yield StopIfHigherHook(evaluation["accuracy"], 0.99)
    yield StopIfLowerHook("loss", 0.1, timer=EverySteps(10))
    yield StopIfHigherHook("loss", 0.1, timer=EveryEpochs(2))
    yield ProfilerHook(timer=AtSteps([100, 200]), runs=5)
    yield ProfilerHook(timer=OnSignal("SIGUSR2"))
    yield MirrorHook(Path("run"), "s3://bucket/run-17", keep_remote=20, storage_options={"anon": False})
    yield CheckpointSaverHook(folder, save_steps=5, saver=Saver(3), listeners=[Listening()])
    yield BestCheckpointHook(folder, lambda accuracy: accuracy, save_steps=5, mode="max", keep=3)
    yield LedgerHook(folder, what=["inputs", "parameters"], timer=EverySteps(10))
    yield PeriodicHook(every_n_epochs=2)
    yield from (Watching(), Narrowed(), Silent(), RecordingHook("loss"))


def step_fn(step_context: StepContext[Outputs]) -> int:
    assert_type(step_context.run_with_hooks(torch.ones(2), torch.ones(1)), Outputs)
    assert_type(step_context.session, Session)
    return 3


def remember(best: float) -> float:
    own = Variables(best=best)
    own.later = [torch.ones(1)]
    assert_type(own.best, Any)
    lowest: float = own.best
    return lowest


def stopping(step_context: StepContext[Outputs]) -> int:
    step_context.request_stop()


def train(folder: Path, loader: torch.utils.data.DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> str | None:
    scaffold = Scaffold(init_fn=init_fn, ready_fn=ready_fn)
    with MonitoredLoop(
        step,
        model,
        optimizer,
        hooks=hooks(folder),
        scaffold=scaffold,
        state={"scheduler": scheduler},
        step_unit="optimizer_step",
        stop_grace_period_secs=1.5,
        checkpoint_dir=folder,
        recoverable_errors=[AbortedError],
        metadata={"lr": 0.1, "layers": [3, 4]},
        ranks=Ranks(tick_secs=0.5),
    ) as loop:
        assert_type(loop, MonitoredLoop[Outputs])
        for epoch in loop.until_stop(range(3), resume=False):
            assert_type(epoch, int)
            for batch in loop.until_stop(loader, limit=10):
                assert_type(batch, Any)  # as torch says of a DataLoader
                assert_type(loop.run(*batch), Outputs)
            for number, item in loop.enumerate([torch.ones(2)], start=1):
                assert_type(number, int)
                assert_type(item, torch.Tensor)
            for inputs, targets in loop.until_stop(zip([torch.ones(2)], [torch.ones(1)])):
                assert_type(inputs, torch.Tensor)
                assert_type(loop.run(inputs, targets=targets).accuracy, float)
        with loop.step() as outputs:
            outputs["loss"] = torch.ones(())
            assert_type(outputs, dict[str, object])
        assert_type(loop.run_step_fn(step_fn), int)
        assert_type(loop.run_step_fn(lambda context: context.run_with_hooks()), Outputs)
        assert_type(loop.should_stop(), bool)
        assert_type(loop.global_step, int)
        assert_type(loop.session, Session)
        assert_type(loop.session.ranks.is_chief, bool)
    with MonitoredLoop(model=model) as bodies:
        assert_type(bodies, MonitoredLoop[Any])
    with MonitoredTrainingLoop(step, model, checkpoint_dir=folder, save_summaries_secs=None) as loop:
        assert_type(loop, MonitoredLoop[Outputs])
    SummaryWriterCache.get(folder).add_scalar("x", 1.0, 1)
    SummaryWriterCache.clear()
    assert_type(loop.stop_reason, str | None)
    loop.close()
    return loop.stop_reason


def test_errors() -> None:
    try:
        MonitoredLoop(lambda: None).run()
    except (AbortedError, FeedError, NanLossDuringTrainingError, LifecycleError) as error:
        assert_type(error, AbortedError | FeedError | NanLossDuringTrainingError | LifecycleError)
    except FetchError as error:
        known: TorchHooksError | LookupError = NoRunYetError(str(error))
    except PeerError as error:
        assert_type(error.rank, int | None)


class Telling(Extension):
    def __init__(self, hook: SessionRunHook) -> None:
        self.hook = hook

    def plan(self, plan: LoopPlan) -> LoopPlan:
        assert_type(plan.folder, str | None)
        assert_type(plan.all_hooks, tuple[SessionRunHook, ...])
        return replace(plan, last=(*plan.last, self.hook))

    def found(self, session: Session, finding: Finding) -> None:
        assert_type(finding.message, str)

    def close(self, reason: str, failed: bool) -> None: ...


def test_an_extension(hook: SessionRunHook) -> None:
    def make(plan: LoopPlan) -> Extension | None:
        return Telling(hook) if plan.counts_runs else None

    factory: Callable[[LoopPlan], Extension | None] = register_extension(make)
    unregister_extension(factory)


def test_a_hook() -> None:
    with FakeClock() as clock:
        clock.advance(1.5)
        seen = trace(Watching(), losses=[0.5, torch.ones(())], step_unit="run")
    assert_type(seen, Trace)
    assert_type(seen.steps, list[int])

"""What the library says where a program does nothing, or not what its author means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.processes import fork_program
from support.rank_threads import Hub, ThreadRanks, in_threads
from torch import nn

from torchhooks import (
    BestCheckpointHook,
    CallFnHook,
    CheckpointSaverHook,
    Due,
    EvaluationHook,
    FeedFnHook,
    FetchError,
    FinalOpsHook,
    LoggingTensorHook,
    MonitoredLoop,
    MonitoredTrainingLoop,
    NanTensorHook,
    PeriodicHook,
    ProfilerHook,
    Saver,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    latest,
)
from torchhooks.testing import RecordingHook, RecordingWriter

Lines = list[tuple[str, str]]


def half() -> float:
    return 0.5


def warnings_in(lines: Lines) -> list[str]:
    return [text for level, text in lines if level == "WARNING"]


# -- a loop without a run -------------------------------------------------------------------------------------------


def no_run(lines: Lines) -> list[str]:
    return [text for text in warnings_in(lines) if "there was no run" in text]


def test_a_loop_whose_data_ended_without_a_run_warns(lines: Lines) -> None:
    with MonitoredLoop(half) as loop:
        for _ in loop.until_stop([1, 2, 3]):
            half()
    assert no_run(lines) == [
        "until_stop yielded 3 items until the data ended, but there was no run, so no hook was called and no step was "
        "counted: call loop.run(...) instead of the step, or put the step into with loop.step()"
    ]


def test_a_loop_of_epochs_without_a_run_warns_once(lines: Lines) -> None:
    with MonitoredLoop(half) as loop:
        for _ in loop.until_stop(range(2)):
            for _ in loop.until_stop([1, 2, 3]):
                half()
    assert len(no_run(lines)) == 1


def with_a_run(loop: MonitoredLoop[float]) -> None:
    for _ in loop.until_stop([1, 2]):
        loop.run()


def with_a_run_after_the_data(loop: MonitoredLoop[float]) -> None:
    for _ in loop.until_stop([1, 2]):
        half()
    loop.run()


def without_items(loop: MonitoredLoop[float]) -> None:
    assert list(loop.until_stop([])) == []


def of_empty_epochs(loop: MonitoredLoop[float]) -> None:
    for _ in loop.until_stop(range(2)):
        without_items(loop)


def left_by_a_break(loop: MonitoredLoop[float]) -> None:
    for _ in loop.until_stop([1, 2]):
        break


def stopped(loop: MonitoredLoop[float]) -> None:
    for _ in loop.until_stop([1, 2]):
        loop.request_stop()


@pytest.mark.parametrize(
    "body", [with_a_run, with_a_run_after_the_data, without_items, of_empty_epochs, left_by_a_break, stopped]
)
def test_no_other_loop_warns_of_it(body: Callable[[MonitoredLoop[float]], None], lines: Lines) -> None:
    with MonitoredLoop(half) as loop:
        body(loop)
    assert no_run(lines) == []


def test_a_loop_that_failed_warns_of_the_error_alone(lines: Lines) -> None:
    loop = MonitoredLoop(half)
    assert list(loop.until_stop([1])) == [1]
    loop.__exit__(KeyError, KeyError(), None)
    assert no_run(lines) == []


def test_a_resumed_loop_with_nothing_left_does_not_warn(tmp_path: Path, lines: Lines) -> None:
    def epochs() -> None:
        hooks = [CheckpointSaverHook(tmp_path, save_steps=1)]
        with MonitoredLoop(half, hooks=hooks, checkpoint_dir=tmp_path) as loop:
            for _ in loop.until_stop(range(2)):
                for _ in loop.until_stop([1, 2]):
                    loop.run()

    epochs()
    epochs()
    assert no_run(lines) == []


# -- hooks of another library ---------------------------------------------------------------------------------------


class Foreign(SessionRunHook):
    def on_train_end(self) -> None: ...

    def on_epoch_end(self) -> None: ...


class Misspelled(SessionRunHook):
    def after_step(self) -> None: ...


class WithState(SessionRunHook):
    """Overrides nothing, and only has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class WithHelper(SessionRunHook):
    def end(self, session: Session) -> None:
        self.helper()

    def helper(self) -> None: ...


class WithoutMethods(SessionRunHook):
    limit = 3

    @property
    def value(self) -> int:
        raise AssertionError("a property is not a method, and must not be read")


def test_a_hook_that_overrides_nothing_but_has_methods_warns_at_creation(lines: Lines) -> None:
    MonitoredLoop(half, hooks=[WithHelper(), Foreign(), Misspelled()]).close()
    expected = (
        "hooks[{}] is a {}, but overrides no method of SessionRunHook, so the loop calls none of its methods. The "
        "methods that it would call are begin(), after_create_session(), before_run(), after_run(), why_finished(), "
        "end(), teardown(), next_due(), sat_out(), force_due()"
    )
    assert warnings_in(lines) == [
        expected.format(1, "Foreign, which has on_epoch_end(), on_train_end()"),
        expected.format(2, "Misspelled, which has after_step()"),
    ]


def test_a_training_loop_warns_of_such_a_hook_once(lines: Lines) -> None:
    MonitoredTrainingLoop(half, hooks=[Foreign()], log_step_count_steps=None).close()
    assert len([text for text in warnings_in(lines) if "is a Foreign" in text]) == 1


@pytest.mark.parametrize("hook", [WithState(), WithHelper(), WithoutMethods(), SessionRunHook(), RecordingHook()])
def test_no_other_hook_warns_of_it(hook: SessionRunHook, lines: Lines) -> None:
    MonitoredLoop(half, hooks=[hook]).close()
    assert warnings_in(lines) == []


def test_a_method_that_an_instance_has_counts_as_one_that_is_overridden(lines: Lines) -> None:
    hook = Foreign()
    vars(hook)["end"] = lambda session: None
    MonitoredLoop(half, hooks=[hook]).close()
    assert warnings_in(lines) == []


# -- periodic hooks in another hook -----------------------------------------------------------------------------------


class Holder(SessionRunHook):
    """A hook of the script with something in an attribute."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def end(self, session: Session) -> None: ...


class HolderWithPeriod(PeriodicHook):
    def __init__(self, inner: object) -> None:
        super().__init__(every_n_steps=2)
        self.inner = inner


class Pair(NamedTuple):
    """A tuple with an iteration of its own, which must not be called."""

    first: object
    second: object

    def __iter__(self) -> Any:
        raise AssertionError("code of the script")


class Unreadable:
    """An object of the script that can only be read by running code of it."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise AssertionError("code of the script")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("code of the script")


class UnreadableList(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("code of the script")


class HolderWithProperty(Holder):
    @property
    def other(self) -> object:
        raise AssertionError("code of the script")


def logging_hook() -> LoggingTensorHook:
    return LoggingTensorHook(["loss"], every_n_steps=1)


def in_itself(value: object) -> list[object]:
    items: list[object] = [value]
    items.append(items)
    return items


INNER = (
    "hooks[1] is a {}, which has a LoggingTensorHook in its attribute inner that is not in hooks: the loop calls only "
    "the hooks in hooks=[...], and one that another hook calls is never due. To have this loop call it, put it into "
    "the list. A hook that has to give it something can be a subclass of it, or share an object with it"
)


@pytest.mark.parametrize("holder", [Holder, HolderWithPeriod, HolderWithProperty])
@pytest.mark.parametrize(
    "place",
    [
        lambda hook: hook,
        lambda hook: [1, hook],
        lambda hook: (hook, "a"),
        lambda hook: {"a": hook},
        lambda hook: {"a": [(Unreadable(), hook)]},
        lambda hook: Pair(Unreadable(), hook),
        lambda hook: [hook, hook],
        in_itself,
    ],
    ids=["attribute", "list", "tuple", "dict", "nested", "named tuple", "twice", "in itself"],
)
def test_a_periodic_hook_in_a_hook_of_the_script_warns_once(
    holder: Callable[[object], SessionRunHook], place: Callable[[object], object], lines: Lines
) -> None:
    hook = holder(place(logging_hook()))
    MonitoredLoop(half, hooks=[StopAtStepHook(last_step=1), hook]).close()
    assert [text for text in warnings_in(lines) if "which has a" in text] == [INNER.format(type(hook).__name__)]


def test_a_training_loop_warns_of_a_periodic_hook_in_a_hook_once(lines: Lines) -> None:
    holder = Holder([logging_hook(), StepCounterHook(every_n_steps=5)])
    MonitoredTrainingLoop(half, hooks=[holder], log_step_count_steps=None).close()
    held = [text.partition(" in its")[0] for text in warnings_in(lines) if "in its attribute" in text]
    assert [text.partition("which has ")[2] for text in held] == ["a LoggingTensorHook", "a StepCounterHook"]


@pytest.mark.parametrize(
    "inner",
    [
        lambda: StopAtStepHook(last_step=1),
        lambda: Holder(None),
        Unreadable,
        lambda: UnreadableList([logging_hook()]),
        lambda: [logging_hook()] * 1000,
        lambda: [[[[logging_hook()]]]],
        lambda: LoggingTensorHook,
    ],
    ids=["without a period", "of the script", "unreadable", "another list", "long", "deep", "class"],
)
def test_no_other_value_in_a_hook_warns(inner: Callable[[], object], lines: Lines) -> None:
    MonitoredLoop(half, hooks=[Holder(inner())]).close()
    assert warnings_in(lines) == []


@pytest.mark.parametrize("is_last", [True, False])
def test_a_reference_to_a_periodic_hook_of_the_loop_is_no_warning(is_last: bool, lines: Lines) -> None:
    hook = logging_hook()
    holder = Holder({"logging": [hook]})
    MonitoredLoop(half, hooks=[holder, hook] if is_last else [hook, holder]).close()
    assert [text for text in warnings_in(lines) if "in its attribute" in text] == []


def test_a_hook_of_the_package_may_have_others(lines: Lines) -> None:
    hook = RecordingHook()
    vars(hook)["inner"] = logging_hook()
    MonitoredLoop(half, hooks=[hook]).close()
    assert warnings_in(lines) == []


def test_the_chief_alone_warns_of_a_periodic_hook_in_a_hook(lines: Lines) -> None:
    def main(ranks: ThreadRanks, hub: Hub) -> None:
        MonitoredLoop(half, hooks=[Holder(logging_hook())], ranks=ranks).close()

    assert in_threads(2, main) == [None, None]
    assert len([text for text in warnings_in(lines) if "in its attribute" in text]) == 1


# -- next_due ---------------------------------------------------------------------------------------------------------


class Answering(SessionRunHook):
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None: ...

    def next_due(self) -> Due:
        answer: Due = self.answer
        return answer

    def __repr__(self) -> str:
        return "Answering()"


@pytest.mark.parametrize(
    ("answer", "shown"), [(100, "100"), ((None, None), "(None, None)"), (range(3), "range(0, 3)"), (True, "True")]
)
def test_a_next_due_that_returns_something_else_than_a_due_is_an_error(answer: Any, shown: str) -> None:
    with pytest.raises(TypeError) as raised:
        MonitoredLoop(half, hooks=[RecordingHook(), Answering(answer)])
    assert str(raised.value) == (
        f"next_due of Answering() (hook 1) returned {shown}: return a Due, such as Due(step=100), or None"
    )


# -- fetches that do not exist ----------------------------------------------------------------------------------------


class Scores(NamedTuple):
    score: float


class Thing:
    pass


def error_of_fetch(fetch: Any, outputs: Any, model: nn.Module | None = None, optimizer: Any = None) -> str:
    loop = MonitoredLoop(lambda: outputs, model, optimizer)
    loop.run()
    with pytest.raises(FetchError) as raised:
        loop.session.run(fetch)
    loop.close()
    return str(raised.value)


IN_SOME_RUNS = " If it is so in some runs only, fetch latest('loss')."


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (None, " The step returned None: return what hooks ask for, such as the loss." + IN_SOME_RUNS),
        ((0.5, 0.25), " The step returned a tuple, whose items are named '0', '1'."),
        ([0.5], " The step returned a list, whose items are named '0'."),
        ("done", " The step returned 'done', of type str, which has no names: return a dict instead."),
        (
            {},
            ' The outputs are an empty dict: put what hooks ask for into it, such as outputs["loss"] = loss.'
            + IN_SOME_RUNS,
        ),
        ((), " The step returned (), of type tuple, which has no names: return a dict instead."),
        (nn.Linear(1, 1), " The step returned Linear(...), of type Linear, which has no names: return a dict instead."),
    ],
)
@pytest.mark.parametrize("fetch", ["loss", lambda loss: loss])
def test_the_error_says_what_the_step_returned(fetch: Any, outputs: Any, said: str) -> None:
    assert error_of_fetch(fetch, outputs).endswith(said)


@pytest.mark.parametrize("outputs", [{"score": 0.5}, Scores(0.5), torch.ones(()), 3])
def test_outputs_with_names_of_their_own_are_listed_and_not_explained(outputs: Any) -> None:
    assert error_of_fetch("weight", outputs).endswith("global_step.")


def test_before_the_first_run_nothing_is_said_of_what_the_step_returned() -> None:
    with pytest.raises(FetchError) as raised, MonitoredLoop(half) as loop:
        loop.session.run("loss")
    assert "The step returned" not in str(raised.value)


def test_a_hook_gets_the_same_explanation() -> None:
    with (
        pytest.raises(FetchError, match="The step returned None"),
        MonitoredLoop(print, hooks=[NanTensorHook("loss")]) as loop,
    ):
        loop.run()


@pytest.mark.parametrize(("name", "meant"), [("model.0.weight", "'0.weight'"), ("model.2.bias", "'2.bias'")])
def test_the_name_that_is_meant_is_suggested_alone(name: str, meant: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert f"does not exist. Did you mean {meant}? Available" in error_of_fetch(name, 0.5, model, optimizer)


# -- wrong arguments ----------------------------------------------------------------------------------------------

MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


MANY: Any = torch.arange(4.0)
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "model": (lambda: MonitoredLoop(half, optimizer()), "model=SGD(...): must be"),  # type: ignore[arg-type]
    "optimizer": (lambda: MonitoredLoop(half, None, MODEL), "optimizer=Sequential(...): must be"),  # type: ignore[arg-type]
    "step": (lambda: MonitoredLoop(MANY), "step=Tensor(...): must be"),
    "hooks": (lambda: MonitoredLoop(half, hooks=optimizer()), "hooks=SGD(...): pass a list"),  # type: ignore[arg-type]
    "a hook": (lambda: MonitoredLoop(half, hooks=[MODEL]), "hooks[0]=Sequential(...) is no"),  # type: ignore[list-item]
    "state": (lambda: MonitoredLoop(half, state={"x": MANY}), "state['x']=Tensor(...): must have"),
    "a scaffold": (lambda: MonitoredLoop(half, scaffold=MODEL), "scaffold=Sequential(...): must be"),  # type: ignore[arg-type]
    "step_unit": (
        lambda: MonitoredLoop(half, MODEL, step_unit="optimizer_step"),
        'step_unit="optimizer_step" counts the steps of an optimizer, and optimizer=None',
    ),
    "last_step": (lambda: StopAtStepHook(last_step=MODEL), "last_step=Sequential(...): must be a whole"),  # type: ignore[arg-type]
    "both": (
        lambda: StopAtStepHook(MODEL, optimizer()),  # type: ignore[arg-type]
        "StopAtStepHook(num_steps=Sequential(...), last_step=SGD(...)): give one",
    ),
    "periods": (
        lambda: CheckpointSaverHook("run", MODEL, optimizer()),  # type: ignore[arg-type]
        "save_secs=Sequential(...): a period",
    ),
    "seconds": (lambda: StepCounterHook(None, MODEL), "every_n_secs=Sequential(...): a period"),  # type: ignore[arg-type]
    "keep": (lambda: Saver(MODEL), "max_to_keep=Sequential(...): must be"),  # type: ignore[arg-type]
    "formatter": (lambda: LoggingTensorHook(["loss"], 1, formatter=MANY), "formatter=Tensor(...): must be"),
    "tensors": (lambda: LoggingTensorHook(MODEL[0], 1), "tensors=Linear(...): give a dict"),
    "feed_fn": (lambda: FeedFnHook(MANY), "feed_fn=Tensor(...): must be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_about_a_wrong_argument_prints_the_type_of_a_large_one(case: str) -> None:
    call, said = WRONG[case]
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert str(raised.value).startswith(said)


LOSS: Any = {"loss": "loss"}
FOLDER: Any = "run"
IN_ANOTHER_ORDER: dict[str, tuple[Callable[[], object], str]] = {
    "summaries": (lambda: SummarySaverHook(100, FOLDER, LOSS), "save_secs='run'"),
    "a period too many": (lambda: SummarySaverHook(100, LOSS, FOLDER), "save_secs={'loss': 'loss'}"),
    "the folder first": (lambda: SummarySaverHook(FOLDER, None, LOSS), "save_steps='run'"),
    "the folder": (lambda: SummarySaverHook(100, None, LOSS, FOLDER), "output_dir={'loss': 'loss'}"),
    "a profile": (lambda: ProfilerHook(100, FOLDER), "save_secs='run'"),
    "profiles": (lambda: ProfilerHook(100, output_dir=LOSS), "output_dir={'loss': 'loss'}"),
    "a counter": (lambda: StepCounterHook(100, FOLDER), "every_n_secs='run'"),
    "an evaluation": (lambda: EvaluationHook(half, 100, FOLDER), "timer='run'"),
    "log lines": (
        lambda: LoggingTensorHook(["loss"], print),  # type: ignore[arg-type]
        "every_n_iter=<built-in function print>",
    ),
}


@pytest.mark.parametrize("case", IN_ANOTHER_ORDER)
def test_an_argument_in_the_place_of_another_is_named_in_the_error(case: str) -> None:
    call, said = IN_ANOTHER_ORDER[case]
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert str(raised.value).startswith(f"{said}: ")
    assert str(raised.value).endswith("; pass arguments after the first by name")


@pytest.mark.parametrize(
    "call",
    [
        lambda: CheckpointSaverHook(600, save_steps=1),  # type: ignore[arg-type]
        lambda: BestCheckpointHook(600, "loss", save_steps=1, mode="min"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_first_argument_has_no_hint_about_the_others(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == "checkpoint_dir=600: must be the path of a folder, a str or os.PathLike"


def test_a_large_item_in_a_list_is_printed_as_its_type() -> None:
    with pytest.raises(TypeError, match=r"^optimizer=\[SGD\(\.\.\.\), SGD\(\.\.\.\)\]: must be"):
        MonitoredLoop(half, MODEL, [optimizer(), optimizer()])  # type: ignore[arg-type]


def test_a_class_is_printed_as_a_class() -> None:
    with pytest.raises(TypeError, match=r"^model=<class 'torch\.nn\.modules\.linear\.Linear'>: must be"):
        MonitoredLoop(half, nn.Linear)  # type: ignore[arg-type]


def test_a_long_text_is_shortened() -> None:
    with pytest.raises(TypeError) as raised:
        MonitoredLoop(half, "x" * 5000)  # type: ignore[arg-type]
    assert len(str(raised.value)) < 400


def test_a_request_that_is_a_module_is_printed_as_its_type() -> None:
    class Requesting(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return MODEL  # type: ignore[return-value]

    with pytest.raises(TypeError, match=r"returned Sequential\(\.\.\.\): return"):
        MonitoredLoop(half, hooks=[Requesting()]).run()


def test_a_hook_that_watches_a_tensor_is_printed_without_its_values() -> None:
    assert repr(NanTensorHook(MANY, also_inf=True)) == "NanTensorHook(Tensor(...), also_inf=True)"


# -- the last step ----------------------------------------------------------------------------------------------------


def one_run(lines: Iterable[tuple[str, str]]) -> list[str]:
    return [text for level, text in lines if level == "INFO" and "already" in text]


@pytest.mark.parametrize("last_step", [7, 3, 0])
def test_a_loop_that_starts_at_or_beyond_its_last_step_logs_that_it_makes_one_run(
    last_step: int, tmp_path: Path, lines: Lines
) -> None:
    Saver().save(_at_step(7), tmp_path / "model.ckpt", 7)
    with MonitoredLoop(half, hooks=[StopAtStepHook(last_step=last_step)], checkpoint_dir=tmp_path) as loop:
        while not loop.should_stop():
            loop.run()
    assert loop.global_step == 8
    assert one_run(lines) == [f"StopAtStepHook(last_step={last_step}): the global step is 7 already"]


@pytest.mark.parametrize("hook", [StopAtStepHook(last_step=8), StopAtStepHook(num_steps=1)])
def test_a_loop_that_has_steps_left_does_not(hook: SessionRunHook, tmp_path: Path, lines: Lines) -> None:
    Saver().save(_at_step(7), tmp_path / "model.ckpt", 7)
    with MonitoredLoop(half, hooks=[hook], checkpoint_dir=tmp_path) as loop:
        loop.run()
    assert one_run(lines) == []


def _at_step(step: int) -> Session:
    session = Session()
    session.global_step = step
    return session


NEVER_CLOSED = """
from torchhooks import LoggingTensorHook, MonitoredLoop

def train(number):
    loop = MonitoredLoop(lambda: 1 / (3 - number), hooks=[LoggingTensorHook(["loss"], at_end=True)])
    for _ in loop.until_stop(range(3)):
        loop.run()
    return loop

kept, _ = train(1), train(2)
train(0).close()
try:
    train(3)  # it fails, which is why its end() is not called
except ZeroDivisionError:
    pass
"""


def test_loops_that_are_never_closed_are_warned_of_at_the_end_of_the_process() -> None:
    printed = fork_program(NEVER_CLOSED).stderr
    assert printed.count("WARNING") == 1
    assert "2 loops were never closed, so end() of the hooks was not called" in printed


# -- names that hooks will ask for ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "level", "said"),
    [
        (LoggingTensorHook(["los"], every_n_steps=99), "INFO", "'los', which the first run did not return. Did you"),
        (FinalOpsHook({"a": "lost"}), "INFO", "'lost', which the first run did not return. Did you mean 'loss'?"),
        (CallFnHook(lambda los: None, every_n_steps=99), "INFO", "'los', a parameter of the arguments of <lambda>"),
        (EvaluationHook(lambda modle: 0.0, every_n_steps=99), "INFO", "'modle', a parameter of <lambda>"),
        (LoggingTensorHook(["0.wieght"], every_n_steps=99), "WARNING", "'0.wieght', which does not exist. Did you"),
        (
            SummarySaverHook(every_n_steps=99, summary_writer=RecordingWriter(), summary_op={"a": "7:output"}),
            "WARNING",
            "'7:output', which",
        ),
        (LoggingTensorHook([latest("sometimes")], every_n_steps=99), "", ""),
        (LoggingTensorHook(["0:output", "0.weight.grad", "batch", "inputs"], every_n_steps=99), "", ""),
        (FinalOpsHook(lambda model, session, outputs, other=1: 0), "", ""),
    ],
)
def test_a_name_that_a_hook_will_ask_for_in_vain_is_said_after_the_first_run(
    hook: SessionRunHook, level: str, said: str, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    loop = MonitoredLoop(lambda inputs: {"loss": model(inputs).sum()}, model, hooks=[hook])
    loop.run(torch.ones(1, 1))
    loop.run(torch.ones(1, 1))
    found = [(each, text) for each, text in lines if "will ask for" in text]
    assert [each for each, _ in found] == [level] * bool(level)
    assert all(said in text for _, text in found)
    loop.session.close()


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (CallFnHook(lambda: None, every_n_steps=5), "was never due: the training run had 4 steps"),
        (CallFnHook(lambda: None, every_n_epochs=3), "was never due: the training run had 2 epochs"),
        (CallFnHook(lambda: None, every_n_steps=4), ""),
        (CallFnHook(lambda: None, every_n_epochs=2), ""),
        (CallFnHook(lambda: None, every_n_steps=5, at_end=True), ""),
        (LoggingTensorHook(["global_step"], every_n_iter=5), ""),  # TensorFlow's period is due in the first run
    ],
)
@pytest.mark.parametrize("paused", [False, True])
def test_a_period_longer_than_the_training_run_is_said_at_its_end(
    hook: SessionRunHook, said: str, paused: bool, lines: Lines
) -> None:
    with MonitoredLoop(lambda: None, hooks=[hook]) as loop:
        for _ in loop.until_stop(range(2)):
            for _ in loop.until_stop(range(2)):
                loop.run()
        if paused:
            loop.request_stop("the time is up")
    found = [text for _, text in lines if "never due" in text]
    assert len(found) == (bool(said) and not paused)
    assert all(text.endswith(said) for text in found)

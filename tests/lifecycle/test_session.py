"""The raw session, which hooks are given, and the scaffold that it is made from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchhooks import (
    AbortedError,
    CheckpointSaverHook,
    FetchError,
    LifecycleError,
    LoggingTensorHook,
    MonitoredLoop,
    NoRunYetError,
    PeriodicHook,
    Saver,
    Scaffold,
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from torchhooks.testing import RecordingHook


def half() -> float:
    return 0.5


@pytest.fixture
def model() -> torch.nn.Linear:
    return torch.nn.Linear(2, 1)


# -- what it knows ----------------------------------------------------------------------------------------------------


def test_has_what_the_loop_was_given(model: torch.nn.Linear) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saver: Any = object()  # which nothing is asked of
    scaffold = Scaffold(saver=saver)
    with MonitoredLoop(half, model, optimizer, scaffold=scaffold, state={"scheduler": scheduler}) as loop:
        session = loop.session
    assert (session.model, session.optimizer, session.saver) == (model, optimizer, saver)
    assert session.state == {"scheduler": scheduler}


def test_state_is_copied(model: torch.nn.Linear) -> None:
    state = {"ema": model}
    with MonitoredLoop(half, state=state) as loop:
        state.clear()
        assert loop.session.state == {"ema": model}


def test_has_nothing_where_nothing_was_given() -> None:
    session = Session()
    assert (session.model, session.optimizer, session.checkpoint_dir) == (None, None, None)
    assert (session.state, session.hooks, session.global_step) == ({}, {}, 0)
    assert session.begun_at == 0


def test_the_device_is_where_the_model_is(model: torch.nn.Linear) -> None:
    assert Session(model.to("meta")).device == torch.device("meta")


def test_the_device_follows_a_model_whose_parameters_are_replaced() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    session = Session(model)
    before = session.device
    model.to_empty(device="cpu")
    assert (before, session.device) == (torch.device("meta"), torch.device("cpu"))


def test_a_model_of_buffers_has_their_device() -> None:
    assert Session(torch.nn.BatchNorm1d(2, affine=False, device="meta")).device == torch.device("meta")


@pytest.mark.parametrize("empty", [None, torch.nn.ReLU()], ids=["no model", "no parameters"])
def test_without_parameters_the_device_is_the_cpu(empty: torch.nn.Module | None) -> None:
    assert Session(empty).device == torch.device("cpu")


# -- the step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 7, np.int64(7), torch.tensor(7)])
def test_the_step_may_be_set_to_any_whole_number(step: Any) -> None:
    session = Session()
    session.global_step = step
    assert session.global_step == int(step)
    assert type(session.global_step) is int


@pytest.mark.parametrize("step", [-1, 0.5, "7", None])
def test_the_step_is_a_whole_number_and_not_negative(step: Any) -> None:
    session = Session()
    with pytest.raises(ValueError, match=r"global_step=.*: .* 0 or more"):
        session.global_step = step
    assert session.global_step == 0


def test_runs_count_on_from_a_step_that_was_set() -> None:
    with MonitoredLoop(half) as loop:
        loop.session.global_step = 41
        loop.run()
        assert loop.global_step == loop.session.global_step == 42
        assert loop.session.begun_at == 41


# -- run --------------------------------------------------------------------------------------------------------------


def test_run_evaluates_in_the_shape_of_the_fetches(model: torch.nn.Linear) -> None:
    with MonitoredLoop(half, model) as loop:
        loop.run()
        values = loop.session.run({"l": ["loss"], "s": ("global_step", lambda loss: loss * 2)})
    assert values == {"l": [0.5], "s": (1, 1.0)}


def test_run_calls_no_hook_and_makes_no_step() -> None:
    hook = RecordingHook()
    with MonitoredLoop(half, hooks=[hook]) as loop:
        before = list(hook.calls)
        loop.session.run("global_step")
        assert (hook.calls, loop.global_step) == (before, 0)


def test_run_sees_what_was_changed_outside_of_a_run(model: torch.nn.Linear) -> None:
    with MonitoredLoop(half, model) as loop:
        torch.nn.init.ones_(model.weight)
        assert loop.session.run("weight").tolist() == [[1.0, 1.0]]


def test_a_feed_gives_a_name_its_value_for_this_call() -> None:
    with MonitoredLoop(half) as loop:
        loop.run()
        assert loop.session.run(lambda loss, scale: loss * scale, {"loss": 3.0, "scale": 2.0}) == 6.0
        assert loop.session.run("loss") == 0.5


def test_the_outputs_of_the_last_run_come_back_without_their_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    with MonitoredLoop(lambda: weight * 2) as loop:
        assert loop.run().requires_grad
        assert not loop.session.run("loss").requires_grad


def test_an_output_before_the_first_run_is_an_error_that_says_so() -> None:
    with MonitoredLoop(half) as loop, pytest.raises(NoRunYetError, match="only after a run"):
        loop.session.run("loss")


def test_an_unknown_name_is_an_error_with_what_there_is() -> None:
    with MonitoredLoop(half) as loop:
        loop.run()
        with pytest.raises(FetchError, match=r"Session.run asked for 'los'.*Did you mean 'loss'"):
            loop.session.run("los")


@pytest.mark.parametrize("kind", ["output", "input", "grad"])
def test_what_is_seen_only_while_a_step_is_made_is_refused(kind: str, model: torch.nn.Linear) -> None:
    net = torch.nn.Sequential(model)
    with MonitoredLoop(half, net) as loop, pytest.raises(FetchError, match="SessionRunArgs"):
        loop.session.run({"x": [f"0:{kind}"]})


def test_run_after_close_is_refused() -> None:
    loop = MonitoredLoop(half)
    loop.close()
    with pytest.raises(LifecycleError, match=r"Session.run\('global_step'\): this session is closed"):
        loop.session.run("global_step")


def test_a_session_whose_loop_failed_at_creation_is_closed() -> None:
    sessions: list[Session] = []

    def init_fn(scaffold: Scaffold, session: Session) -> None:
        sessions.append(session)
        raise KeyError

    with pytest.raises(KeyError):
        MonitoredLoop(half, scaffold=Scaffold(init_fn=init_fn))
    with pytest.raises(LifecycleError):
        sessions[0].run("global_step")


# -- run_available, for the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fetches", "values"),
    [
        ("loss", None),
        ({"loss": "loss", "step": "global_step"}, {"step": 0}),
        (["loss", "global_step"], [None, 0]),
        (("global_step", lambda loss: loss), (0, None)),
        ({"x": {"loss": "loss"}, "y": ["loss"]}, {"x": {}, "y": [None]}),
    ],
    ids=["name", "dict", "list", "tuple", "nested"],
)
def test_what_only_a_run_could_give_is_left_out_when_there_was_none(
    fetches: Any, values: Any, lines: list[tuple[str, str]]
) -> None:
    with MonitoredLoop(half) as loop:
        assert loop.session.run_available(fetches) == values
    assert {level for level, _ in lines} == {"WARNING"}
    assert all(text.endswith("It is left out.") for _, text in lines)


def test_the_warning_about_what_is_left_out_says_who_asked(lines: list[tuple[str, str]]) -> None:
    with MonitoredLoop(half, hooks=[LoggingTensorHook(["loss"], at_end=True)]):
        pass
    assert lines[0][1].startswith("LoggingTensorHook(['loss'], at_end=True) asked for 'loss'")


def test_nothing_is_left_out_once_there_was_a_run(lines: list[tuple[str, str]]) -> None:
    with MonitoredLoop(half) as loop:
        loop.run()
        assert loop.session.run_available({"loss": "loss"}) == {"loss": 0.5}
    assert lines == []


def test_a_mistake_is_an_error_all_the_same() -> None:
    with MonitoredLoop(half) as loop:
        loop.run()
        with pytest.raises(FetchError, match="'los'"):
            loop.session.run_available({"x": "los"})


# -- Scaffold ---------------------------------------------------------------------------------------------------------


def test_init_fn_gets_the_scaffold_and_the_session() -> None:
    given: list[object] = []
    scaffold = Scaffold(init_fn=lambda *arguments: given.extend(arguments))
    with MonitoredLoop(half, scaffold=scaffold) as loop:
        assert given == [scaffold, loop.session]


def test_init_fn_comes_before_ready_fn_and_both_before_the_hooks_get_the_session() -> None:
    calls: list[Any] = []

    def ready_fn(session: Session) -> bool:
        calls.append(("ready",))
        return True

    scaffold = Scaffold(init_fn=lambda *_: calls.append(("init",)), ready_fn=ready_fn)
    with MonitoredLoop(half, hooks=[RecordingHook(calls=calls)], scaffold=scaffold):
        assert calls == [("begin",), ("init",), ("ready",), ("after_create_session", 0)]


def test_ready_fn_gets_the_session() -> None:
    given: list[Session] = []

    def ready_fn(session: Session) -> bool:
        given.append(session)
        return True

    with MonitoredLoop(half, scaffold=Scaffold(ready_fn=ready_fn)) as loop:
        assert given == [loop.session]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (False, "the session is not ready: ready_fn returned False"),
        ("no vocabulary", "the session is not ready: no vocabulary"),
        ("", "the session is not ready: ready_fn returned ''"),
        (None, "the session is not ready: ready_fn returned None"),
    ],
)
def test_a_session_that_is_not_ready_is_an_error_that_says_what_is_missing(answer: Any, words: str) -> None:
    with pytest.raises(LifecycleError, match=words):
        MonitoredLoop(half, scaffold=Scaffold(ready_fn=lambda session: answer))


def init_fn(scaffold: Scaffold, session: Session) -> None: ...


def ready_fn(session: Session) -> bool:
    return True


WHOLE: dict[str, Any] = {"init_fn": init_fn, "summary_op": {"loss": "loss"}, "saver": object(), "ready_fn": ready_fn}


@pytest.mark.parametrize("name", WHOLE)
def test_what_was_not_given_is_copied_from_the_other_scaffold(name: str) -> None:
    copied = Scaffold(copy_from_scaffold=Scaffold(**WHOLE))
    assert getattr(copied, name) is WHOLE[name]


@pytest.mark.parametrize("name", WHOLE)
def test_what_was_given_is_kept(name: str) -> None:
    mine = object()
    arguments: dict[str, Any] = {name: mine}
    assert getattr(Scaffold(**arguments, copy_from_scaffold=Scaffold(**WHOLE)), name) is mine


def test_the_scaffold_that_is_copied_from_stays_as_it_is() -> None:
    saver = Saver()
    other = Scaffold(saver=saver)
    Scaffold(saver=Saver(), copy_from_scaffold=other)
    assert other.saver is saver


def test_a_scaffold_is_copied_only_from_a_scaffold() -> None:
    with pytest.raises(TypeError, match="copy_from_scaffold='x': must be a Scaffold"):
        Scaffold(copy_from_scaffold="x")  # type: ignore[arg-type]


# -- where it has begun -----------------------------------------------------------------------------------------------


def test_it_begins_where_it_was_restored_or_set_before_its_first_run() -> None:
    with MonitoredLoop(
        lambda: 0.5, scaffold=Scaffold(init_fn=lambda _, session: setattr(session, "global_step", 7))
    ) as loop:
        loop.run()
        assert (loop.session.begun_at, loop.global_step) == (7, 8)


def test_a_step_that_a_hook_sets_in_a_run_is_no_new_beginning() -> None:
    class CountsExamples(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.session.global_step += 63

    with MonitoredLoop(lambda: 0.5, hooks=[CountsExamples()]) as loop:
        loop.run()
        loop.run()
        assert (loop.session.begun_at, loop.global_step) == (0, 128)


# -- what a session shares with its loop ------------------------------------------------------------------------------


def test_a_model_that_init_fn_sets_has_its_submodules_watched(model: torch.nn.Linear) -> None:
    def init(scaffold: Scaffold, session: Session) -> None:
        session.model = torch.nn.Sequential(model)

    class Output(PeriodicHook):
        fetches = "0:output"

        def run_due(self, run_context: SessionRunContext, values: Any) -> None:
            shapes.append(values.shape)

    shapes: list[torch.Size] = []
    hook = Output(every_n_steps=1)
    with MonitoredLoop(lambda: model(torch.ones(3, 2)).sum(), hooks=[hook], scaffold=Scaffold(init)) as loop:
        loop.run()
    assert shapes == [(3, 1)]


def test_a_recovery_makes_another_session_with_the_same_savers(tmp_path: Path) -> None:
    fails = [False, True, True, False]

    def step() -> None:
        if fails.pop(0):
            raise AbortedError

    hooks = [CheckpointSaverHook(tmp_path, save_steps=1)]
    with MonitoredLoop(step, hooks=hooks, checkpoint_dir=tmp_path) as loop:
        loop.run()
        first, savers = loop.session, [*loop.session.savers]
        loop.run()
        assert loop.session is not first
        assert loop.session.position is first.position
        assert loop.session.savers == savers


def test_the_folder_of_the_checkpoints_is_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Saves(SessionRunHook):
        saves_checkpoints = True
        checkpoint_dir = "out"

    monkeypatch.chdir(tmp_path)
    with MonitoredLoop(half, hooks=[Saves()], checkpoint_dir="run") as loop:
        assert (loop.session.saved_to, loop.session.checkpoint_dir) == (str(tmp_path / "out"), str(tmp_path / "run"))


def test_a_session_without_a_loop_restores_no_position_and_saves_none(tmp_path: Path) -> None:
    with MonitoredLoop(half, hooks=[CheckpointSaverHook(tmp_path, save_steps=1)]) as loop:
        for _ in loop.until_stop(range(2)):
            for _ in loop.until_stop(range(3)):
                loop.run()
    session = Session()
    Saver().restore_latest(session, tmp_path)
    assert (session.global_step, session.epoch, session.why_finished) == (6, None, None)
    assert session.position.state_dict() is None


class Attached(PeriodicHook):
    """A hook of a user, with a method of a name that other libraries use for their handlers."""

    attached_to: object = None

    def attach(self, model: object) -> None:
        self.attached_to = model


def test_a_hook_may_have_a_method_called_attach(model: torch.nn.Linear) -> None:
    hook = Attached(every_n_steps=1)
    hook.attach(model)
    with MonitoredLoop(half, hooks=[hook]) as loop:
        loop.run()
    assert hook.attached_to is model

"""The report of an autopsy: ``report.json`` for programs, ``report.md`` for people, and ten lines of it in the log."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torchhooks.common.text import shortened
from torchhooks.fetches.names import Value
from torchhooks.tools.autopsy.figures import Figures
from torchhooks.tools.autopsy.operations import Origin, Source
from torchhooks.tools.autopsy.request import BROKEN_STATE, NAN, Environment, Request, shown_path, write, write_json
from torchhooks.tools.autopsy.watching import ModuleCall, WatchedRun

_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in optimizer.step()",
    "after": "after the step, in a fetch or a hook",
}
# In this order a rank has the cause: what begins in the forward pass of one reaches the gradients of all.
_ORDER = ["data", "before", "forward", "after", "backward", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class BrokenState:
    """Which parameters and buffers were the first that were not finite, and since when."""

    step: int
    when: str
    names: list[str]


@dataclass(frozen=True, kw_only=True)
class BatchFile:
    """``batch.pt``: what the step got. ``missing`` says why there is none."""

    file: str | None = None
    what: str = ""
    weights_only: bool = True
    missing: str | None = None


@dataclass(frozen=True)
class RankSummary:
    """What one of several ranks has found."""

    rank: int
    problem: str | None
    origin: Origin | None


@dataclass(kw_only=True)
class Report:
    """What an examination has found on one rank; ``report.json`` is that of the rank that has the cause."""

    request: Request
    step: int
    """The step at which the value is wrong this time."""
    rank: int
    restored_step: int
    came_back: bool = True
    problem: str | None = None
    """What is wrong with the value this time."""
    origin: Origin | None = None
    run: int = -1
    """The number in :attr:`runs` of the run with the origin; without an origin, of the last one."""
    eager: bool = False
    """Whether compiled code was run as Python instead."""
    watched_from: int | None = None
    """The first step whose operators were watched."""
    outputs: dict[str, object] = field(default_factory=dict)
    """What the last run of the step returned."""
    not_finite_at_start: list[str] = field(default_factory=list)
    """Which parameters and buffers were not finite when the first run began, as a mask of infinities."""
    not_finite_first: BrokenState | None = None
    """Which of the others were not finite first."""
    runs: list[WatchedRun] = field(default_factory=list)
    batch_file: BatchFile | None = None
    state: str | None = None
    """The name of the checkpoint of the state before the run."""
    digests: dict[str, str] = field(default_factory=dict)
    """What the last run depends on, to be compared with the request."""
    environment: Environment | None = None
    notes: list[str] = field(default_factory=list)
    of_ranks: int = 1
    """How many ranks have examined the step."""
    ranks: list[RankSummary] = field(default_factory=list)
    """What each of several ranks has found."""
    lines: list[str] = field(default_factory=list)
    """What the log says."""

    @property
    def cause_run(self) -> WatchedRun:
        """The run with the origin."""
        return self.runs[self.run]


def plain(value: Value) -> object:
    """Return ``value``, which is on the host, as what JSON has."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and not value.is_complex() else Figures.of(value)
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def first_module(calls: list[ModuleCall]) -> str | None:
    """Return the path of the first call, in the order of execution, that made what is not finite of finite inputs."""
    made = (call.path for call in calls if _all_finite(call.inputs) and not _all_finite(call.outputs))
    return next(made, None)


def _all_finite(figures: list[Figures]) -> bool:
    return not any(each.not_finite for each in figures)


def report_of_cause(reports: list[Report]) -> Report:
    """Return the report of the rank that has the cause, with a summary of the others."""
    several = reports if len(reports) > 1 else []
    ranks = [RankSummary(each.rank, each.problem, each.origin) for each in several]
    return replace(min(reports, key=_order), of_ranks=len(reports), ranks=ranks)


def write_report(path: str, report: Report) -> None:
    """Write ``report`` to the file at ``path``, for people, and to another one next to it, for programs."""
    # First: report.md is what the command ``nan`` looks for, so both files are there once it finds one.
    write_json(os.path.splitext(path)[0] + ".json", report)
    write(path, as_markdown(report).encode())


def earlier_request(report: Report) -> Request | None:
    """Return what to ask of the next process if the state was broken before the runs that were watched."""
    broken = report.not_finite_first
    # From watched_from on, the operators were watched in this process, so another one would find no more.
    if broken is None or not report.restored_step < broken.step < (report.watched_from or 0):
        return None
    message = f"{broken.names[0]} is not finite after step {broken.step}"
    # Without digests: those of the request are of the run with the NaN, and not of the one that broke the state.
    return replace(report.request, step=broken.step, kind=BROKEN_STATE, message=message, rank=report.rank, digests={})


def _order(report: Report) -> tuple[int, int, int]:
    origin = report.origin
    if origin is None:
        return 1, 0, report.rank
    # What came from another rank is known by nothing on this one.
    unnamed = origin.phase == "before" and origin.tensor is None
    return unnamed, origin.step * len(_ORDER) + _ORDER.index(origin.phase), report.rank


# -- the words --------------------------------------------------------------------------------------------------------


def lines_of(report: Report, path: str) -> list[str]:
    """Return what the log says: the cause first, then what is known about it, and that the rest is at ``path``."""
    request = report.request
    if not report.came_back:
        return [*_not_again(report), f"The report is {shown_path(path)}. The training run goes on."]
    lines = [_headline(report), *_cause(report)]
    if report.eager:
        lines.append("This run was made in eager mode, without torch.compile, and shows the same.")
    if report.not_finite_at_start:
        lines.append(f"The state: {_listed(report.not_finite_at_start)} not finite when this process began.")
    if report.not_finite_first is not None:
        broken = report.not_finite_first
        lines.append(f"The state: {_listed(broken.names)} not finite {broken.when}.")
        if (earlier := earlier_request(report)) is not None:
            lines.append(f"Start the script again to look at step {earlier.step} in the same way.")
    elif request.kind == NAN and not report.not_finite_at_start:
        lines.append("The state: all parameters and buffers are finite, also after this step.")
    lines += _item(report) + _trend(report) + report.notes
    lines.append(f"The report is {shown_path(path)}.{_rerun(report, os.path.dirname(path))}")
    return lines


def _headline(report: Report) -> str:
    request, rank = report.request, _of_rank(report)
    again = "again" if report.step == request.step else f"now at step {report.step}"
    return f"autopsy of step {request.step}: {report.problem or request.message}, {again}{rank}."


def _of_rank(report: Report) -> str:
    return f" (rank {report.rank} of {report.of_ranks})" if report.of_ranks > 1 else ""


def _cause(report: Report) -> list[str]:
    origin, run = report.origin, report.cause_run
    if origin is None:
        module = first_module(run.modules)
        if module is None:
            return ["The cause was not found: no operator of torch made it of finite values in this process."]
        return [f"The first module that made it of finite inputs is {_module(run, module)}."]
    lines = [f"Cause: {_origin(report, origin)}"]
    if rates := [rate for rate in run.lr if not math.isfinite(rate)]:
        lines.append(f"The learning rate of step {run.step} was {_numbers(rates)}.")
    given = [f"{name}={value}" for name, value in origin.numbers.items()] + [*map(shown_figures, origin.inputs)]
    if given:
        lines.append(f"It got {'; '.join(given)}.")
    if origin.outputs and origin.operation is not None:
        lines.append(f"It made {'; '.join(map(shown_figures, origin.outputs))}.")
    if origin.became_nan is not None:
        lines.append(f"The infinity became a NaN: {_origin(report, origin.became_nan)}")
    return lines


def _origin(report: Report, origin: Origin) -> str:
    """Return a sentence about where a value that is not finite was made, or that it was there."""
    kind = "a NaN" if origin.kind == "NaN" else "an infinity"
    name, share = origin.tensor, shown_figures(origin.outputs[0]) if origin.outputs else ""
    if origin.phase == "data":
        where = re.sub("^item", "the item of the data", name or "")
        return f"the data. There is {kind} in {where} ({share})."
    if origin.phase == "before":
        if name is None:
            used = "" if origin.source is None else f", first used in {_shown_line(origin.source)}"
            return f"{kind} in a tensor that was there before the operators that were watched ({share}){used}."
        return f"{name} had {kind} before step {origin.step} ({share})."
    made = "reserved memory that no operator wrote to, with" if origin.is_unwritten else "made"
    sentence = f"{origin.operation} {made} {kind} {_PHASES[origin.phase]}"
    if origin.step != report.step:
        sentence += f", in step {origin.step}" if origin.phase == "after" else f" of step {origin.step}"
    if origin.module is not None:
        sentence += f", in {_module(report.runs[origin.run], origin.module)}"
    elif origin.phase == "forward":
        sentence += ", outside of the model"
    if origin.tensor is not None:
        sentence += f", in {origin.tensor}"
    if origin.node is not None:
        sentence += f", as {origin.node}"
    if origin.source is not None:
        sentence += f" ({_shown_line(origin.source)})"
    return sentence + "."


def _shown_line(source: Source) -> str:
    return f"{os.path.basename(source.file)}:{source.line}: {source.text}"


def _module(run: WatchedRun, path: str) -> str:
    classes = {call.path: call.class_name for call in run.modules}
    return f"{path or 'the model'} ({classes[path]})" if path in classes else path or "the model"


def shown_figures(figures: Figures) -> str:
    """Return the figures of a tensor in a few words."""
    about = f"{figures.dtype} {'x'.join(map(str, figures.shape)) or 'one number'}"
    if figures.part is not None:
        about += f" (of which this rank has {'x'.join(map(str, figures.part))})"
    if figures.min is not None:
        about += f" from {figures.min:.4g} to {figures.max:.4g}, mean of |x| {figures.mean_abs:.4g}"
    if figures.not_finite:
        about += f", {100 * figures.not_finite:.3g} % not finite"
    return about


def _item(report: Report) -> list[str]:
    run, origin, broken = report.cause_run, report.origin, report.not_finite_first
    is_earlier = origin is not None and origin.phase == "before" and (broken is None or broken.step != run.step)
    if run.item is None or is_earlier:  # the item of a later run has nothing to do with it
        return []
    of = "" if run.step == report.step else f" of step {run.step}"
    return [f"The data{of}: item {run.item} of epoch {run.epoch}, both counted from 0."]


def _trend(report: Report) -> list[str]:
    runs = report.runs[-6:]
    norms = [f"{run.gradient_norm:.4g}" for run in runs if run.gradient_norm is not None]
    skipped = [str(run.step) for run in runs[:-1] if not run.optimizer_steps]
    lines = []
    if norms:
        lines.append(f"The norm of the gradients up to this step: {', '.join(norms)}.")
    if skipped and any(run.optimizer_steps for run in runs):
        steps = ", ".join(skipped)
        lines.append(f"The optimizer made no step in {steps}, as when a GradScaler skips one, or gradients accumulate.")
    return lines + _growth(report)


def _growth(report: Report) -> list[str]:
    """Return lines about the modules and gradients that are far larger than in the runs before."""
    *before, last = report.runs[: report.runs.index(report.cause_run) + 1]
    outputs = _grown([_largest(run) for run in before], _largest(last))
    gradients = _grown([run.gradients for run in before], last.gradients)
    named = {"outputs": [(_module(last, path), grown) for path, grown in outputs], "gradients": gradients}
    return [
        f"Largest {title}, from the median of the runs before to step {last.step}: "
        f"{shortened([f'{name} {grown}' for name, grown in rows], 4)}."
        for title, rows in named.items()
        if rows
    ]


def _largest(run: WatchedRun) -> dict[str, float]:
    """Return the largest absolute value among the finite ones that each module returned."""
    found: dict[str, float] = {}
    for call in run.modules:
        for figures in call.outputs:
            if figures.min is not None and figures.max is not None:
                found[call.path] = max(found.get(call.path, 0.0), abs(figures.min), abs(figures.max))
    return found


def _grown(before: list[dict[str, float]], last: dict[str, float]) -> list[tuple[str, str]]:
    found = []
    for path, value in last.items():
        earlier = [run[path] for run in before if path in run]
        if earlier and value > 10 * statistics.median(earlier) > 0:
            found.append((path, f"{statistics.median(earlier):.4g} -> {value:.4g}"))
    return found


def _rerun(report: Report, folder: str) -> str:
    if report.state is None:
        return ""
    state = shown_path(os.path.join(folder, report.state))
    return f" To begin with the state before the step: checkpoint_dir={state!r}."


def _listed(names: list[str]) -> str:
    return f"{shortened(names, 3)} {'is' if len(names) == 1 else 'are'}"


def _not_again(report: Report) -> list[str]:
    """Return the lines about a NaN that did not come back."""
    request = report.request
    before, now = request.digests, report.digests
    # Digests of another length are those of an older version.
    common = [name for name in before if len(before[name]) == len(now.get(name, ""))]
    other = [name for name in common if before[name] != now[name]]
    lines = [f"autopsy of step {request.step}: {request.message} at the first time, and not this time."]
    shown = "; ".join(f"{name} {before[name]} then, {now[name]} now" for name in (other or common))
    then = request.environment
    if report.eager:
        lines.append("This run was made in eager mode: the NaN may be one of the compiled code alone.")
    if any(name.startswith("input") for name in other):
        lines.append(f"The data are not the same: {shown}. What loads or augments them is not seeded.")
    elif other:
        lines.append(f"Random numbers are not the same: {shown}. A source of noise is not seeded, or not saved.")
    else:
        same = f"The digests are the same ({shown}), and the result is not: " if common else ""
        data = "" if any(name.startswith("input") for name in common) else "other data, "
        lines.append(
            f"{same}{data}an operator that is not deterministic, noise or a variable of the script that a checkpoint "
            f"does not contain, or a fault of the hardware: {then.host}, {then.device_name or then.device}."
        )
    if changed := _changes(then, report.environment):
        lines.append(f"Not as at the first time: {', '.join(changed)}.")
    return lines


def _changes(then: Environment, now: Environment | None) -> list[str]:
    if now is None:
        return []
    pairs = {
        "torch": (then.torch, now.torch),
        "host": (then.host, now.host),
        "device": (then.device, now.device),
        "device_uuid": (then.device_uuid, now.device_uuid),
    }
    return [f"{name} {before} -> {after}" for name, (before, after) in pairs.items() if before != after]


def as_markdown(report: Report) -> str:
    """Return ``report.md``."""
    parts = [f"# Autopsy of step {report.request.step}", "", *(f"* {line}" for line in report.lines), ""]
    parts += _table("The last runs", ["step", "value", "lr", "gradient norm", "optimizer steps"], [
        [run.step, _shown(run.value), _numbers(run.lr), _number(run.gradient_norm), run.optimizer_steps]
        for run in report.runs
    ])  # fmt: skip
    if report.outputs:
        outputs = [[name, _shown(value)] for name, value in report.outputs.items()]
        parts += _table("What the step returned", ["name", "value"], outputs)
    rows = [
        [call.path or "the model", call.class_name, what, *_cells(figures)]
        for call in report.cause_run.modules
        for what, tensors in (("inputs", call.inputs), ("outputs", call.outputs))
        for figures in tensors
    ]
    names = ["tensor", "min", "max", "mean of absolute values", "not finite"]
    parts += _table("The modules, in the order in which they returned", ["module", "class", "what", *names], rows)
    largest = [_largest(run) for run in report.runs]
    history = [
        [path or "the model", *(_number(each.get(path)) for each in largest)]
        for path in dict.fromkeys(path for each in largest for path in each)
    ]
    steps = [f"step {run.step}" for run in report.runs]
    parts += _table("The largest output of each module", ["module", *steps], history)
    rows = [[name, *_cells(figures)] for name, figures in report.cause_run.state.items()]
    parts += _table("What was there before the step", ["name", *names], rows)
    if report.batch_file:
        parts += ["## Files", "", _about_batch(report.batch_file), ""]
    return "\n".join(parts)


def _about_batch(batch: BatchFile) -> str:
    if batch.missing is not None:
        return f"There is no batch.pt: {batch.missing}"
    only = "" if batch.weights_only else ", weights_only=False"
    return f"`torch.load({batch.file!r}{only})` returns {batch.what}."


def _table(title: str, names: list[str], rows: Sequence[Sequence[object]]) -> list[str]:
    if not rows:
        return []
    lines = [names, ["---"] * len(names), *rows]
    return [f"## {title}", "", *("| " + " | ".join(map(str, row)) + " |" for row in lines), ""]


def _cells(figures: Figures) -> list[str]:
    about = f"{figures.dtype} {figures.shape if figures.part is None else figures.part}"
    numbers = [_number(number) for number in (figures.min, figures.max, figures.mean_abs)]
    return [about, *numbers, "" if figures.not_finite is None else f"{100 * figures.not_finite:.3g} %"]


def _shown(value: object) -> object:
    return shown_figures(value) if isinstance(value, Figures) else value


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _numbers(values: list[float]) -> str:
    return ", ".join(map(_number, values))

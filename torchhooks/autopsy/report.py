"""The report of an autopsy: ``report.json`` for programs, ``report.md`` for people, and ten lines of it in the log."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping
from typing import Any

import torch

from torchhooks.autopsy.figures import Figures
from torchhooks.autopsy.modules import Call
from torchhooks.autopsy.operations import Origin
from torchhooks.autopsy.request import Request, shown_path, write_json
from torchhooks.common.log import logger
from torchhooks.common.text import shortened
from torchhooks.lifecycle.session import Session

_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in optimizer.step()",
    "after": "in a fetch, after the step",
}
# In this order a rank has the cause: what begins in the forward pass of one reaches the gradients of all.
_ORDER = ["before", "forward", "after", "backward", "optimizer"]


Gradients = dict[str, torch.Tensor]
"""The norms of gradients, by the name of the parameter."""


class Report:
    """What an examination has found on one rank. ``request`` is what it was asked."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._runs: list[tuple[dict[str, Any], Gradients, list[Call], dict[str, Figures]]] = []
        self.step: int = request["step"]
        self.problem: str | None = None
        """What is wrong with the value this time."""
        self.came_back = True
        self.eager = False
        """Whether compiled code was run as Python instead."""
        self.restored_step = 0
        self.watched_from: int | None = None
        """The first step whose operators were watched."""
        self.origin: Origin | None = None
        self.broken: dict[str, Any] | None = None
        """Which parameters and buffers were not finite first, and when."""
        self.broken_at_start: list[str] = []
        """Which were not finite when the first run began, as a mask of infinities."""
        self.parameters: dict[str, Figures] = {}
        """Those before the step."""
        self.modules: list[Call] = []
        self.kinds: dict[str, str] = {}
        self.outputs: dict[str, Any] = {}
        self.digests: dict[str, str] = {}
        self.environment: dict[str, Any] = {}
        self.has_state = False
        self.batch: dict[str, Any] = {}
        self.notes: list[str] = []
        self.unreadable = 0

    def add_run(
        self, step: int, session: Session, value: Any, gradients: Gradients, optimizer_steps: int, calls: list[Call]
    ) -> None:
        """Add the figures of a run. They are read from the device in :meth:`to_save`."""
        groups = getattr(session.optimizer, "param_groups", [])
        about = {
            "step": step,
            "value": _plain(value),
            "lr": [float(group["lr"]) for group in groups if "lr" in group],
            "optimizer_steps": optimizer_steps,
        }
        self._runs.append((about, gradients, calls, self.parameters))

    def to_save(self, session: Session) -> dict[str, Any]:
        """Return all of it as plain data. Waits for the device."""
        runs = [
            {
                **about,
                **_norms(gradients),
                "largest": _largest(calls),
                "modules": self._calls(calls),
                "parameters": {name: figures.to_save() for name, figures in parameters.items()},
            }
            for about, gradients, calls, parameters in self._runs
        ]
        return {
            "step": self.step,
            "came_back": self.came_back,
            "rank": session.ranks.rank,
            "problem": self.problem,
            "origin": None if self.origin is None else self.origin.to_save(),
            "module": self._first_module(),
            "eager": self.eager,
            "restored_step": self.restored_step,
            "watched_from": self.watched_from,
            "epoch": session.epoch,
            "batch": session.batch,
            "outputs": {name: _plain(value) for name, value in self.outputs.items()},
            "not_finite_at_start": self.broken_at_start,
            "not_finite_first": self.broken,
            "runs": runs,
            "modules": self._calls(self.modules),
            "parameters": {name: figures.to_save() for name, figures in self.parameters.items()},
            "batch_file": self.batch,
            "has_state": self.has_state,
            "digests": self.digests,
            "environment": self.environment,
            "notes": self.notes + _notes(self.unreadable),
        }

    def _calls(self, calls: list[Call]) -> list[dict[str, Any]]:
        return [
            {
                "path": call.path,
                "class": self.kinds.get(call.path),
                "inputs": [each.to_save() for each in call.inputs],
                "outputs": [each.to_save() for each in call.outputs],
            }
            for call in calls
        ]

    def _first_module(self) -> dict[str, Any] | None:
        """Return the first call, in the order of execution, whose inputs are finite and whose output is not."""
        for call in self.modules:
            if _finite(call.inputs) and not _finite(call.outputs):
                return {"path": call.path, "class": self.kinds.get(call.path)}
        return None


def _norms(gradients: Gradients) -> dict[str, Any]:
    norms = {name: norm.item() for name, norm in gradients.items()}
    total = math.sqrt(sum(norm**2 for norm in norms.values())) if norms else None
    return {"gradient_norm": total, "gradients": norms}


def _finite(figures: list[Figures]) -> bool:
    return not any(each.to_save().get("not_finite") for each in figures)


def _largest(calls: list[Call]) -> dict[str, float]:
    """Return the largest absolute value among the finite ones that each module returned."""
    found: dict[str, float] = {}
    for call in calls:
        for each in (figures.to_save() for figures in call.outputs):
            if "min" in each:
                found[call.path] = max(found.get(call.path, 0.0), abs(each["min"]), abs(each["max"]))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "numel"):
        return value.item() if value.numel() == 1 and not value.is_complex() else Figures(value).to_save()
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _notes(unreadable: int) -> list[str]:
    return [f"The results of {unreadable} operators could not be looked at."] if unreadable else []


def write_report(folder: str, ranks: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Write the report about what ``ranks`` have found into ``folder``, log the beginning, and return it.

    Raises:
        OSError: it cannot be written. What it says is logged all the same.
    """
    chosen = min(ranks, key=_order)
    report = {**chosen, "request": request, "of_ranks": len(ranks)}
    if len(ranks) > 1:
        report["ranks"] = [{name: each[name] for name in ("rank", "problem", "origin")} for each in ranks]
    report["lines"] = lines = lines_of(report, folder)
    is_written = False
    try:
        os.makedirs(folder, exist_ok=True)
        write_json(os.path.join(folder, "report.json"), report)
        with open(os.path.join(folder, "report.md"), "w", encoding="utf-8") as file:
            file.write(as_markdown(report, lines))
        is_written = True
    finally:
        for line in lines if is_written else lines[:-1]:  # the last one says where the report is
            logger.warning("%s", line)
    return report


def began_before(report: dict[str, Any]) -> Request | None:
    """Return what to ask of the next process if the state was broken before the runs that were watched."""
    broken = report["not_finite_first"]
    if broken is None or not report["restored_step"] < broken["step"] < (report["watched_from"] or 0):
        return None
    return {
        "step": broken["step"],
        "kind": "state",
        "message": f"{broken['names'][0]} is not finite after step {broken['step']}",
        "rank": report["rank"],
        "digests": {},
    }


def _order(found: dict[str, Any]) -> tuple[int, int, int]:
    origin = found["origin"]
    if origin is None:
        return 1, 0, found["rank"]
    # What came from another rank is known by nothing on this one.
    unnamed = origin["phase"] == "before" and origin.get("tensor") is None
    return unnamed, origin["step"] * len(_ORDER) + _ORDER.index(origin["phase"]), found["rank"]


# -- the words --------------------------------------------------------------------------------------------------------


def lines_of(report: dict[str, Any], folder: str) -> list[str]:
    """Return what the log says: the cause first, then what is known about it, and where the rest is."""
    request = report["request"]
    if not report["came_back"]:
        return [
            *_not_again(report),
            f"The report is {shown_path(os.path.join(folder, 'report.md'))}. The training run goes on.",
        ]
    lines = [_headline(report), *_cause(report)]
    if report["eager"]:
        lines.append("This run was made in eager mode, without torch.compile, and shows the same.")
    if report["not_finite_at_start"]:
        lines.append(f"The state: {_listed(report['not_finite_at_start'])} not finite when this process began.")
    if report["not_finite_first"] is not None:
        broken = report["not_finite_first"]
        lines.append(f"The state: {_listed(broken['names'])} not finite {broken['when']}.")
        if (earlier := began_before(report)) is not None:
            lines.append(f"Start the script again to look at step {earlier['step']} in the same way.")
    elif request["kind"] == "NaN" and not report["not_finite_at_start"]:
        lines.append("The state: all parameters and buffers are finite, also after this step.")
    lines += _item(report) + _trend(report) + report["notes"]
    lines.append(f"The report is {shown_path(os.path.join(folder, 'report.md'))}.{_rerun(report, folder)}")
    return lines


def _headline(report: dict[str, Any]) -> str:
    request, rank = report["request"], _of_rank(report)
    again = "again" if report["step"] == request["step"] else f"now at step {report['step']}"
    return f"autopsy of step {request['step']}: {report['problem'] or request['message']}, {again}{rank}."


def _of_rank(report: dict[str, Any]) -> str:
    return f" (rank {report['rank']} of {report['of_ranks']})" if report["of_ranks"] > 1 else ""


def _cause(report: dict[str, Any]) -> list[str]:
    origin = report["origin"]
    if origin is None:
        module = report["module"]
        if module is None:
            return ["The cause was not found: no operator of torch made it of finite values in this process."]
        return [f"The first module that made it of finite inputs is {_module(report, module['path'])}."]
    lines = [f"Cause: {_origin(report, origin)}"]
    if origin.get("inputs"):
        lines.append(f"It got {'; '.join(map(shown_figures, origin['inputs']))}.")
    if origin.get("outputs") and origin["phase"] != "before":
        lines.append(f"It made {'; '.join(map(shown_figures, origin['outputs']))}.")
    if "became_nan" in origin:
        lines.append(f"The infinity became a NaN: {_origin(report, origin['became_nan'])}")
    return lines


def _origin(report: dict[str, Any], origin: dict[str, Any]) -> str:
    """Return a sentence about where a value that is not finite was made, or that it was there."""
    kind = "a NaN" if origin["kind"] == "NaN" else "an infinity"
    if origin["phase"] == "before":
        name = origin.get("tensor")
        share = shown_figures(origin["outputs"][0]) if origin.get("outputs") else ""
        if name is None:
            used = f", first used in {_source(origin)}" if "source" in origin else ""
            return f"{kind} in a tensor that was there before the operators that were watched ({share}){used}."
        if name.startswith(("input", "item")):
            where = name if name.startswith("input") else name.replace("item", "the item of the data", 1)
            return f"the data. There is {kind} in {where} ({share})."
        return f"{name} had {kind} before step {origin['step']} ({share})."
    sentence = f"{origin['operation']} made {kind} {_PHASES[origin['phase']]}"
    if origin["step"] != report["step"]:
        sentence += f" of step {origin['step']}"
    if "module" in origin:
        sentence += f", in {_module(report, origin['module'])}"
    elif origin["phase"] == "forward":
        sentence += ", outside of the model"
    if "tensor" in origin:
        sentence += f", in {origin['tensor']}"
    if "node" in origin:
        sentence += f", as {origin['node']}"
    if "source" in origin:
        sentence += f" ({_source(origin)})"
    return sentence + "."


def _source(origin: dict[str, Any]) -> str:
    source = origin["source"]
    return f"{os.path.basename(source['file'])}:{source['line']}: {source['text']}"


def _module(report: dict[str, Any], path: str) -> str:
    kinds = {each["path"]: each["class"] for each in report["modules"]}
    return f"{path or 'the model'} ({kinds[path]})" if path in kinds else path or "the model"


def shown_figures(figures: dict[str, Any]) -> str:
    """Return the figures of a tensor in a few words."""
    shape = "x".join(map(str, figures["shape"])) or "one number"
    about = f"{figures['dtype']} {shape}"
    if "part" in figures:
        about += f" (of which this rank has {'x'.join(map(str, figures['part']))})"
    if "min" in figures:
        about += f" from {figures['min']:.4g} to {figures['max']:.4g}, mean of |x| {figures['mean_abs']:.4g}"
    if figures.get("not_finite"):
        about += f", {100 * figures['not_finite']:.3g} % not finite"
    return about


def _item(report: dict[str, Any]) -> list[str]:
    if report["batch"] is None:
        return []
    return [f"The data: item {report['batch']} of epoch {report['epoch']}, both counted from 0."]


def _trend(report: dict[str, Any]) -> list[str]:
    runs = report["runs"][-6:]
    norms = [f"{run['gradient_norm']:.4g}" for run in runs if run["gradient_norm"] is not None]
    skipped = [str(run["step"]) for run in runs[:-1] if not run["optimizer_steps"]]
    lines = []
    if norms:
        lines.append(f"The norm of the gradients up to this step: {', '.join(norms)}.")
    if skipped and any(run["optimizer_steps"] for run in runs):
        lines.append(f"The optimizer made no step in {', '.join(skipped)}, as when a GradScaler skips one.")
    return lines + _growth(report)


def _growth(report: dict[str, Any]) -> list[str]:
    """Return lines about the modules and gradients that are far larger than in the runs before."""
    lines: list[str] = []
    for title, key in (("outputs", "largest"), ("gradients", "gradients")):
        grown = []
        *before, last = report["runs"] or [{key: {}}]
        for path, value in last[key].items():
            earlier = [run[key][path] for run in before if path in run[key]]
            if earlier and value > 10 * statistics.median(earlier) > 0:
                name = _module(report, path) if key == "largest" else path
                grown.append(f"{name} {statistics.median(earlier):.4g} -> {value:.4g}")
        if grown:
            lines.append(f"Largest {title}, from the median of the runs before to this one: {shortened(grown, 4)}.")
    return lines


def _rerun(report: dict[str, Any], folder: str) -> str:
    if not report["has_state"]:
        return ""
    state = shown_path(os.path.join(folder, f"model.ckpt-{report['step'] - 1}"))
    return f" To begin with the state before the step: checkpoint_dir={state!r}."


def _listed(names: list[str]) -> str:
    return f"{shortened(names, 3)} {'is' if len(names) == 1 else 'are'}"


def _not_again(report: dict[str, Any]) -> list[str]:
    """Return the lines about a NaN that did not come back."""
    request = report["request"]
    before, now = request["digests"], report["digests"]
    common = [name for name in before if name in now]
    other = [name for name in common if before[name] != now[name]]
    lines = [f"autopsy of step {request['step']}: {request['message']} at the first time, and not this time."]
    shown = "; ".join(f"{name} {before[name]} then, {now[name]} now" for name in (other or common))
    then, env = request["environment"], report["environment"]
    changed = [name for name in ("torch", "host", "device", "device_uuid") if then.get(name) != env.get(name)]
    if report["eager"]:
        lines.append("This run was made in eager mode: the NaN may be one of the compiled code alone.")
    if any(name.startswith("input") for name in other):
        lines.append(f"The data are not the same: {shown}. What loads or augments them is not seeded.")
    elif other:
        lines.append(f"Random numbers are not the same: {shown}. A source of noise is not seeded, or not saved.")
    else:
        same = f"The digests are the same ({shown}), and the result is not: " if common else ""
        lines.append(
            f"{same}an operator that is not deterministic, noise from a source that a checkpoint does not contain, or "
            f"a fault of the hardware: {then.get('host')}, {then.get('device_name') or then.get('device')}."
        )
    if changed:
        lines.append(
            f"Not as at the first time: {', '.join(f'{each} {then.get(each)} -> {env.get(each)}' for each in changed)}."
        )
    return lines


def as_markdown(report: dict[str, Any], lines: list[str]) -> str:
    """Return ``report.md``."""
    parts = [f"# Autopsy of step {report['request']['step']}", "", *(f"* {line}" for line in lines), ""]
    parts += _table("The last runs", ["step", "value", "lr", "gradient norm", "optimizer steps"], [
        [run["step"], run["value"], _numbers(run["lr"]), _number(run["gradient_norm"]), run["optimizer_steps"]]
        for run in report["runs"]
    ])  # fmt: skip
    if report["outputs"]:
        parts += _table("What the step returned", ["name", "value"], [[*item] for item in report["outputs"].items()])
    rows = [
        [each["path"] or "the model", each["class"], what, *_cells(figures)]
        for each in report["modules"]
        for what in ("inputs", "outputs")
        for figures in each[what]
    ]
    names = ["tensor", "min", "max", "mean of absolute values", "not finite"]
    parts += _table("The modules, in the order in which they returned", ["module", "class", "what", *names], rows)
    history = [
        [path or "the model", *(_number(run["largest"].get(path)) for run in report["runs"])]
        for path in dict.fromkeys(path for run in report["runs"] for path in run["largest"])
    ]
    steps = [f"step {run['step']}" for run in report["runs"]]
    parts += _table("The largest output of each module", ["module", *steps], history)
    rows = [[name, *_cells(figures)] for name, figures in report["parameters"].items()]
    parts += _table("What was there before the step", ["name", *names], rows)
    if report["batch_file"]:
        parts += ["## Files", "", _about_batch(report["batch_file"]), ""]
    return "\n".join(parts)


def _about_batch(about: dict[str, Any]) -> str:
    if "missing" in about:
        return f"There is no batch.pt: {about['missing']}"
    only = "" if about["weights_only"] else ", weights_only=False"
    return f"`torch.load({about['file']!r}{only})` returns {about['what']}."


def _table(title: str, names: list[str], rows: list[list[Any]]) -> list[str]:
    if not rows:
        return []
    lines = [names, ["---"] * len(names), *rows]
    return [f"## {title}", "", *("| " + " | ".join(map(str, row)) + " |" for row in lines), ""]


def _cells(figures: dict[str, Any]) -> list[str]:
    about = f"{figures['dtype']} {figures.get('part', figures['shape'])}"
    share = figures.get("not_finite")
    shown = [_number(figures.get(name)) for name in ("min", "max", "mean_abs")]
    return [about, *shown, "" if share is None else f"{100 * share:.3g} %"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _numbers(values: list[float]) -> str:
    return ", ".join(map(_number, values))

"""The parts of a loop, built from the bottom up: each gets, by name, the parts that it uses."""

from __future__ import annotations

from dataclasses import dataclass

from torchhooks.checkpoints.gradients import Gradients
from torchhooks.device.readback import Readback
from torchhooks.lifecycle.ending import Ending
from torchhooks.lifecycle.recovery import Recovery
from torchhooks.lifecycle.signals import SignalWatch
from torchhooks.loop.arguments import LoopArguments
from torchhooks.loop.between_runs import BetweenRuns
from torchhooks.loop.body import Body
from torchhooks.loop.costs import HookCosts
from torchhooks.loop.data import Data
from torchhooks.loop.peers import Peers
from torchhooks.loop.schedule import Schedule
from torchhooks.loop.session_creator import SessionCreator
from torchhooks.position.items import Items
from torchhooks.position.position import Position
from torchhooks.position.progress import DataWaits


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # each generated method takes time on import
class LoopParts:
    """What one loop consists of."""

    schedule: Schedule
    readback: Readback
    signals: SignalWatch
    ending: Ending
    peers: Peers | None
    recovery: Recovery
    costs: HookCosts | None
    gradients: Gradients | None
    items: Items
    sessions: SessionCreator
    between_runs: BetweenRuns
    data: Data
    body: Body


def build(arguments: LoopArguments) -> LoopParts:
    """Build the parts of a loop. No hook is called, and nothing is started."""
    ranks, optimizer = arguments.ranks, arguments.optimizer
    schedule = Schedule(arguments.hooks, ranks, arguments.chief_only, [each.name for each in arguments.signals])
    readback = Readback(schedule.set_pending)
    signals = SignalWatch(arguments.signals, schedule.set_pending)
    ending = Ending(signals, schedule.set_pending)
    peers = Peers(ranks, schedule, ending) if ranks.size > 1 else None
    recovery = Recovery(arguments.recoverable_errors, arguments.max_recoveries, ranks=ranks.size)
    costs = HookCosts(schedule, readback) if arguments.hook_costs else None
    position, waits = Position(schedule, arguments.state, arguments.step.function), DataWaits()
    items = Items(lambda: position.depth)
    saves = arguments.checkpoint_dir is not None or arguments.has_saver
    watched = optimizer if saves and hasattr(optimizer, "register_step_post_hook") else None
    gradients = None if watched is None else Gradients(watched)
    sessions = SessionCreator(
        arguments,
        schedule=schedule,
        readback=readback,
        position=position,
        data_waits=waits,
        items=items,
        ending=ending,
        recovery=recovery,
        costs=costs,
        gradients=gradients,
        peers=peers,
    )
    between_runs = BetweenRuns(
        ending=ending,
        schedule=schedule,
        readback=readback,
        items=items,
        sessions=sessions,
        recovery=recovery,
        peers=peers,
    )
    data = Data(
        schedule=schedule,
        position=position,
        waits=waits,
        items=items,
        ending=ending,
        between_runs=between_runs,
        others=peers,
    )
    body = Body(
        ending=ending,
        schedule=schedule,
        sessions=sessions,
        steps_per_run=arguments.steps_per_run,
        between_runs=between_runs,
    )
    return LoopParts(
        schedule=schedule,
        readback=readback,
        signals=signals,
        ending=ending,
        peers=peers,
        recovery=recovery,
        costs=costs,
        gradients=gradients,
        items=items,
        sessions=sessions,
        between_runs=between_runs,
        data=data,
        body=body,
    )

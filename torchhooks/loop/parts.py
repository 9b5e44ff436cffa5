"""The parts of a loop, built from the bottom up: each gets the parts that it uses."""

from __future__ import annotations

from torchhooks.checkpoints.gradients import Gradients
from torchhooks.device.readback import Readback
from torchhooks.lifecycle.ending import Ending
from torchhooks.lifecycle.recovery import Recovery
from torchhooks.lifecycle.signals import SignalWatch
from torchhooks.loop.arguments import LoopArguments
from torchhooks.loop.between_runs import BetweenRuns
from torchhooks.loop.body import Body
from torchhooks.loop.data import Data
from torchhooks.loop.peers import Peers
from torchhooks.loop.schedule import Schedule
from torchhooks.loop.session_creator import SessionCreator
from torchhooks.position.items import Items
from torchhooks.position.position import Position
from torchhooks.position.progress import DataWaits


class LoopParts:
    """What the loop with these ``arguments`` consists of. No hook is called, and nothing is started."""

    def __init__(self, arguments: LoopArguments) -> None:
        ranks, optimizer = arguments.ranks, arguments.optimizer
        stopping = [each.name for each in arguments.signals]
        self.schedule = schedule = Schedule(arguments.hooks, ranks, arguments.chief_only, stopping)
        self.readback = Readback(schedule.set_pending)
        self.signals = SignalWatch(arguments.signals, schedule.set_pending)
        self.ending = Ending(self.signals, schedule.set_pending)
        self.peers = Peers(ranks, schedule, self.ending) if ranks.size > 1 else None
        self.recovery = Recovery(arguments.recoverable_errors, arguments.max_recoveries, ranks=ranks.size)
        position, waits = Position(schedule, arguments.state), DataWaits()
        self.items = Items(lambda: position.depth)
        saves = arguments.checkpoint_dir is not None or arguments.has_saver
        watched = optimizer if saves and hasattr(optimizer, "register_step_post_hook") else None
        self.gradients = None if watched is None else Gradients(watched)
        self.sessions = SessionCreator(
            arguments,
            schedule=schedule,
            readback=self.readback,
            position=position,
            data_waits=waits,
            items=self.items,
            ending=self.ending,
            recovery=self.recovery,
            gradients=self.gradients,
            peers=self.peers,
        )
        self.between_runs = BetweenRuns(
            ending=self.ending,
            schedule=schedule,
            readback=self.readback,
            items=self.items,
            sessions=self.sessions,
            recovery=self.recovery,
            peers=self.peers,
        )
        self.position = position
        self.data = Data(self.between_runs, position, waits)
        self.body = Body(self.between_runs, arguments.steps_per_run)

"""The extensions by which the tools join every loop. Importing this module registers them.

They are small, and import the tools when there is something to do, so that a process that only imports torchhooks
starts sooner.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from torchhooks.lifecycle.extension import Extension, LoopPlan, register_extension
from torchhooks.lifecycle.session import Finding, Session
from torchhooks.lifecycle.settings import LoopSettings
from torchhooks.progress.training_state import TrainingState
from torchhooks.tools.ledger import CHECK_PLAN

if TYPE_CHECKING:
    from torchhooks.tools.run_record import RunRecord
    from torchhooks.tools.watch.stalls import Watch


class CheckExtension(Extension):
    """Has a loop keep a ledger, and end where ``python -m torchhooks check`` wants it to.

    Args:
        file: what that command has written for this process.
    """

    def __init__(self, file: str) -> None:
        self._file = file

    def plan(self, plan: LoopPlan) -> LoopPlan:
        from torchhooks.tools.ledger.checked import watched

        return watched(plan, self._file)


class AutopsyExtension(Extension):
    """Leaves a request when a hook has found a NaN, and has the process that starts next look for the cause."""

    _has_request = False
    _session: Session | None = None  # in which the first one was left, and whose checkpoints are waited for

    def plan(self, plan: LoopPlan) -> LoopPlan:
        # torchhooks.tools.autopsy, which has the name of the file, is not imported before there is a NaN.
        if plan.folder is None or not os.path.exists(os.path.join(plan.folder, "nan.json")):
            return plan
        from torchhooks.tools.autopsy.examination import with_examination

        return with_examination(plan, plan.folder)

    def start(self, session: Session) -> None:
        # A recovery restores a state from before the NaN. So a checkpoint that is saved after it does not say that the
        # training goes on from a state after the NaN, and the request stays.
        self._has_request = False

    def found(self, session: Session, finding: Finding) -> None:
        from torchhooks.tools.autopsy.request import leave

        if leave(session, *finding):
            self._has_request = True
            # Once for each session: a listener cannot be taken back, and a script may catch many errors in one session.
            if self._session is not session:
                self._session = session
                session.on_checkpoint(partial(self._checkpoint_saved, session))

    def _checkpoint_saved(self, session: Session, folder: str) -> None:
        """Put the request aside: the script has caught the error, and the training has gone on from that state."""
        if self._has_request and folder == session.checkpoint_dir:  # where the next process resumes
            from torchhooks.tools.autopsy.request import put_aside_as_caught

            self._has_request = False
            put_aside_as_caught(session)


class WatchExtension(Extension):
    """Reports a loop that stands still, and tells other processes how far the loop is."""

    _watch: Watch | None = None
    _record: RunRecord | None = None

    def begin(self, training: TrainingState, settings: LoopSettings) -> None:
        from torchhooks.tools.run_record import RunRecord
        from torchhooks.tools.watch.stalls import Watch

        saved_to = training.saved_to
        self._watch = watch = Watch(training, settings.stall_secs, settings.stall_action == "abort", self._write_record)
        if saved_to is not None:
            # Each rank makes the folder, and not only the chief: the watch of each rank writes its stacks there. The
            # first save reports an error.
            with suppress(OSError):
                os.makedirs(saved_to, exist_ok=True)
        watch.start()
        # Only the chief writes the record, because there is one file for all ranks. The watch is started first: the
        # first write of the record may block on the disk, and only the watch would report that.
        if saved_to is not None and training.ranks.is_chief:
            self._record = RunRecord(training, lambda: watch.watched, lambda name: watch.request(name))
            self._record.start()

    def _write_record(self) -> None:
        # Without this, the command status would learn of a stall up to ten seconds after the report.
        if self._record is not None:
            self._record.write()

    def start(self, session: Session) -> None:
        if self._record is not None:
            self._record.begin_session(lambda: session)

    def finish(self, reason: str, failed: bool) -> None:
        if self._record is not None:
            # A MirrorHook copies the record in its teardown, which comes after this. The copy then says why the loop
            # has stopped.
            self._record.finish(reason, failed)

    def close(self, reason: str, failed: bool) -> None:
        try:
            if self._record is not None:
                self._record.close(reason, failed)
        finally:
            # The watch is closed last, because the write of the record may hang, and then the watch reports it.
            if self._watch is not None:
                self._watch.close()


# The outermost first. The watch begins before what may hang, the examination surrounds the ledger of a script under
# check, and all of them see the hooks that extensions of the script add.


@register_extension
def _watch(plan: LoopPlan) -> WatchExtension:
    return WatchExtension()


@register_extension
def _autopsy(plan: LoopPlan) -> AutopsyExtension:
    return AutopsyExtension()


@register_extension
def _check(plan: LoopPlan) -> CheckExtension | None:
    # Asked for each loop, and not when this module is imported: a fork of check gets the variable only after it has
    # imported torchhooks.
    file = os.environ.get(CHECK_PLAN)
    return CheckExtension(file) if file else None

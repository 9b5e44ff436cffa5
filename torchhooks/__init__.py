"""TensorFlow 1's monitored session and its hooks, around a PyTorch training step.

    with MonitoredLoop(step, model, optimizer, hooks=hooks) as loop:
        for batch in loop.until_stop(batches):
            loop.run(batch)

is, without what happens on errors:

    for hook in hooks: hook.begin()
    session = Session(model, optimizer)
    for hook in hooks: hook.after_create_session(session, coord)
    for batch in batches, until a hook asked to stop:
        for hook in hooks: requests += hook.before_run(context)
        outputs = step(batch)
        for hook in hooks: hook.after_run(context, values)
    for hook in hooks: hook.end(session)

:mod:`torchhooks.lifecycle.hook` has the whole contract, docs/reference/fetches.md what a hook can ask for, and
:mod:`torchhooks.testing` what the tests of a hook of one's own need.
"""

import importlib.util
import typing

from torchhooks import summary
from torchhooks.checkpoints.saver import (
    Saver,
    best_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    load_weights,
    read_metadata,
)
from torchhooks.common.errors import (
    AbortedError,
    CheckpointError,
    DamagedCheckpointError,
    FeedError,
    FetchError,
    LifecycleError,
    NanLossDuringTrainingError,
    NoRunYetError,
    PeerError,
    TorchHooksError,
)
from torchhooks.common.stateful import Stateful
from torchhooks.common.timers import (
    AtSteps,
    Due,
    EveryEpochs,
    EverySteps,
    NeverTriggerTimer,
    OnSignal,
    SecondOrStepTimer,
)
from torchhooks.data.variables import Variables
from torchhooks.fetches.over_ranks import grad_norm, over_ranks, param_norm
from torchhooks.fetches.running import latest, running_max, running_mean, running_min, running_sum
from torchhooks.hooks.best import BestCheckpointHook
from torchhooks.hooks.calling import CallFnHook, FeedFnHook
from torchhooks.hooks.counting import StepCounterHook
from torchhooks.hooks.early_stopping import (
    StopIfHigherHook,
    StopIfLowerHook,
    StopIfNoDecreaseHook,
    StopIfNoIncreaseHook,
)
from torchhooks.hooks.evaluation import EvaluationHook
from torchhooks.hooks.profiling import ProfilerHook
from torchhooks.hooks.progress_bar import ProgressBarHook
from torchhooks.hooks.reporting import FinalOpsHook, LoggingTensorHook
from torchhooks.hooks.saving import CheckpointSaverHook, CheckpointSaverListener, SummarySaverHook
from torchhooks.hooks.stopping import GlobalStepWaiterHook, NanTensorHook, StopAtStepHook
from torchhooks.lifecycle.coordinator import Coordinator, LooperThread
from torchhooks.lifecycle.extension import Extension, LoopPlan, register_extension, unregister_extension
from torchhooks.lifecycle.hook import (
    PeriodicHook,
    RunMetadata,
    RunOptions,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from torchhooks.lifecycle.session import Finding, Scaffold, Session
from torchhooks.loop.monitored_loop import MonitoredLoop, StepContext
from torchhooks.ranks.ranks import Ranks
from torchhooks.summary.json_lines import JsonLinesWriter
from torchhooks.summary.trackers import MlflowWriter, PrometheusWriter, WandbWriter
from torchhooks.summary.writers import SummaryWriter, SummaryWriterCache
from torchhooks.training import MonitoredTrainingLoop

if typing.TYPE_CHECKING:
    from torchhooks.tools.ledger.hook import LedgerHook
    from torchhooks.tools.mirror.hook import MirrorHook

    __version__: str
else:  # not for type checkers, which would let every name pass
    _tools = importlib.util.find_spec("torchhooks.tools")
    # A folder that was emptied still counts as a package for Python, a namespace package, which has no origin.
    _has_tools = _tools is not None and _tools.origin is not None

    def __getattr__(name: str) -> object:
        """Return a hook of one of the tools, which are imported on request.

        So is ``__version__``, because the metadata of packages is slow to find.
        """
        if name == "LedgerHook" and _has_tools:
            from torchhooks.tools.ledger.hook import LedgerHook

            return LedgerHook
        if name == "MirrorHook" and _has_tools:
            from torchhooks.tools.mirror.hook import MirrorHook

            return MirrorHook
        if name != "__version__":
            where = ": it is in torchhooks/tools, which is not there" if name in ("LedgerHook", "MirrorHook") else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where}")
        from torchhooks.common.text import installed_version

        return installed_version()


# The names of the tools are in the literal because type checkers read it. They are removed below if the tools are not
# there, as a star import would raise an AttributeError.
__all__ = [
    "AbortedError",
    "AtSteps",
    "BestCheckpointHook",
    "CallFnHook",
    "CheckpointError",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "Coordinator",
    "DamagedCheckpointError",
    "Due",
    "EvaluationHook",
    "EveryEpochs",
    "EverySteps",
    "Extension",
    "FeedError",
    "FeedFnHook",
    "FetchError",
    "FinalOpsHook",
    "Finding",
    "GlobalStepWaiterHook",
    "JsonLinesWriter",
    "LedgerHook",
    "LifecycleError",
    "LoggingTensorHook",
    "LoopPlan",
    "LooperThread",
    "MirrorHook",
    "MlflowWriter",
    "MonitoredLoop",
    "MonitoredTrainingLoop",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "NeverTriggerTimer",
    "NoRunYetError",
    "OnSignal",
    "PeerError",
    "PeriodicHook",
    "ProfilerHook",
    "ProgressBarHook",
    "PrometheusWriter",
    "Ranks",
    "RunMetadata",
    "RunOptions",
    "Saver",
    "Scaffold",
    "SecondOrStepTimer",
    "Session",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "Stateful",
    "StepContext",
    "StepCounterHook",
    "StopAtStepHook",
    "StopIfHigherHook",
    "StopIfLowerHook",
    "StopIfNoDecreaseHook",
    "StopIfNoIncreaseHook",
    "SummarySaverHook",
    "SummaryWriter",
    "SummaryWriterCache",
    "TorchHooksError",
    "Variables",
    "WandbWriter",
    "best_checkpoint",
    "grad_norm",
    "latest",
    "latest_checkpoint",
    "list_checkpoints",
    "load_weights",
    "over_ranks",
    "param_norm",
    "read_metadata",
    "register_extension",
    "running_max",
    "running_mean",
    "running_min",
    "running_sum",
    "summary",
    "unregister_extension",
]

if not typing.TYPE_CHECKING:
    if _has_tools:
        import torchhooks.tools.plugins  # noqa: F401 - it has the tools join every loop
    else:
        __all__.remove("LedgerHook")
        __all__.remove("MirrorHook")

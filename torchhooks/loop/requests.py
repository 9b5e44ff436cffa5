"""What hooks request of a run: checking it, and recording what they feed, watch and trace in its step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from torchhooks.common.errors import FeedError, LifecycleError
from torchhooks.common.text import shown
from torchhooks.common.trees import is_fixed
from torchhooks.fetches.evaluation import watched_names
from torchhooks.fetches.names import check_feed_names, named_outputs
from torchhooks.fetches.watch import NO_WATCH, ModuleWatch
from torchhooks.lifecycle.hook import RunMetadata, RunOptions, SessionRunArgs, SessionRunValues
from torchhooks.loop.schedule import HookSlot

Request = tuple[HookSlot, SessionRunArgs]


class Recorded(NamedTuple):
    """What hooks fed, watched and traced in a step."""

    fed: Mapping[str, object]
    watched: Mapping[str, object]
    options: RunOptions
    metadata: RunMetadata


class Recording:
    """What hooks feed, watch and trace in one step."""

    def __init__(self, requests: list[Request]) -> None:
        self.fed: dict[str, object] = {}
        self.feeders: dict[str, object] = {}
        """The hook that feeds each parameter."""
        self._names: list[tuple[str, object]] = []
        trace = memory = False
        for slot, (fetches, feed_dict, options) in requests:
            self.fed.update(feed_dict or {})
            self.feeders.update(dict.fromkeys(feed_dict or (), slot))
            self._names += [(name, slot) for name in watched_names(fetches)]
            if options is not None:
                trace, memory = trace or options.trace, memory or options.memory
        self._options = RunOptions(trace, memory)
        self._watch = NO_WATCH
        self._profile: Any = None
        self._started = ExitStack()

    def start(self, model: torch.nn.Module | None) -> None:
        """Watch submodules of ``model``, and trace, until :meth:`stop`."""
        with ExitStack() as stack:
            if self._names:
                self._watch = ModuleWatch(model, self._names)
                stack.callback(self._watch.close)
            if self._options.trace:
                from torch.profiler import profile

                self._profile = stack.enter_context(profile(profile_memory=self._options.memory))
            # Last: if the profiler cannot start, the stack removes the watch again, because stop() will not be called.
            self._started = stack.pop_all()

    def stop(self) -> None:
        """Remove what :meth:`start` added."""
        self._started.close()

    def recorded(self, outputs: object) -> Recorded:
        """Return what is known of the step now that it has returned ``outputs``."""
        caught = self._watch.caught(self.fed, outputs)
        metadata = RunMetadata(self._profile) if self._options.trace else NOTHING_RECORDED.metadata
        return Recorded(self.fed, caught, self._options, metadata)


NOTHING_RECORDED = Recorded({}, {}, RunOptions(), RunMetadata())
NO_RESULTS = SessionRunValues(None, NOTHING_RECORDED.options, NOTHING_RECORDED.metadata)


def check_request(requests: list[Request], slot: HookSlot, request: object) -> bool:
    """Raise if what ``slot`` returned is not a request, or feeds what an earlier hook feeds.

    Return whether it is plain: it fetches values and nothing else, and cannot change.
    """
    if not isinstance(request, SessionRunArgs):
        raise TypeError(f"before_run of {slot} returned {shown(request)}: return SessionRunArgs(fetches) or None")
    fetches, feed_dict, options = request
    if feed_dict:
        if not isinstance(feed_dict, Mapping):
            raise TypeError(f"before_run of {slot} feeds {shown(feed_dict)}: return a mapping, parameter name to value")
        check_feed_names(feed_dict, slot)
        for other, (_, fed, _) in requests:
            for name in feed_dict.keys() & (fed or {}):
                raise FeedError(
                    f"{slot} feeds {name!r}, which {other} feeds too: two hooks cannot feed one parameter, remove "
                    "one of them"
                )
    return feed_dict is None and options is None and is_fixed(fetches) and not watched_names(fetches)


def check_late(slot: HookSlot, request: SessionRunArgs, outputs: object) -> None:
    """Raise if ``slot``, which is asked after the step, requests something that has to happen during the step."""
    fetches, feed_dict, options = request
    given = named_outputs(outputs)
    watched = [name for name in watched_names(fetches) if name not in given]
    wishes = [f"feeds {name!r}" for name in feed_dict or ()] + [f"fetches {name!r}" for name in watched]
    wishes += ["requests a trace"] if options is not None and options.trace else []
    if wishes:
        raise LifecycleError(
            f"{slot} {wishes[0]}, but its Due.when is evaluated after the step: let next_due() return None, or a "
            "step, a moment or a number of runs, so that before_run is called before the step"
        )

"""Hooks on several ranks: each takes part on every rank, and the chief writes."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from rank_threads import Hub, ThreadRanks

import torchhooks.log
from torchhooks import (
    BestCheckpointHook,
    FinalOpsHook,
    LoggingTensorHook,
    MonitoredLoop,
    MonitoredTrainingLoop,
    NanLossDuringTrainingError,
    NanTensorHook,
    PeerError,
    Ranks,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    best_checkpoint,
)
from torchhooks.testing import RecordingWriter

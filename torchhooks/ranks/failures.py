"""Errors of a process that trains with others: whether another rank caused one, and ending a process that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys

from torchhooks.common.errors import PeerError
from torchhooks.common.log import logger

_STUCK_EXIT_CODE = 70
_KNOWN = "_torchhooks_known_to_all_ranks"  # the name of an attribute of errors


def is_communication_error(error: BaseException) -> bool:
    """Return whether ``error`` is of a kind that torch.distributed raises when another rank is gone."""
    distributed = sys.modules.get("torch.distributed")
    kinds = (getattr(distributed, "DistError", PeerError), PeerError)
    return (type(error) is RuntimeError and not hasattr(error, _KNOWN)) or isinstance(error, kinds)


def mark_as_known(error: BaseException) -> None:
    """Note that the other ranks know of ``error``, which therefore is no consequence of lost contact with them."""
    with contextlib.suppress(Exception):  # some classes forbid it
        setattr(error, _KNOWN, True)


def end_process(reason: str) -> None:
    """End this process with exit code 70, because nothing in Python gets its training thread out of a blocked call."""
    logger.critical("%s: ending this process with code %d; stderr has the stacks", reason, _STUCK_EXIT_CODE)
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
    os._exit(_STUCK_EXIT_CODE)

"""Steps of a save and a restore that all ranks make together: each succeeds on all of them, or fails on all.

Each step has a name. An error that another rank raised in it has the name in a note, and so has the error of a rank
that waits in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torchhooks.common.errors import CheckpointError, DamagedCheckpointError, PeerError, add_note, brief
from torchhooks.ranks.ranks import Ranks
from torchhooks.ranks.transport import mark_as_known

T = TypeVar("T")
S = TypeVar("S")


def run_on_all(ranks: Ranks, name: str, call: Callable[[], T]) -> T:
    """Call ``call()`` on every rank, and return its result on this rank; raise on all ranks if it raised on one.

    Each rank has to make this step at the same point. The results are not sent.

    Raises:
        CheckpointError: ``call`` raised on another rank; a DamagedCheckpointError if it raised one.
    """
    return _outcomes(ranks, name, call, lambda result: None)[0]


def gather_from_all(ranks: Ranks, name: str, call: Callable[[], T]) -> list[T]:
    """Call ``call()`` on every rank, and return the results of all ranks; raise on all ranks if it raised on one.

    Each rank has to make this step at the same point. The results are pickled and sent to every rank.

    Raises:
        CheckpointError: ``call`` raised on another rank; a DamagedCheckpointError if it raised one.
    """
    return _outcomes(ranks, name, call, lambda result: result)[1]


def _outcomes(ranks: Ranks, name: str, call: Callable[[], T], sent: Callable[[T], S]) -> tuple[T, list[S]]:
    """Return the result of ``call()`` on this rank, and ``sent(result)`` of every rank."""
    if not ranks.is_connected:
        result = call()
        return result, [sent(result)]
    purpose = f"a checkpoint: {name}"
    try:
        # An error that is no Exception, such as a Ctrl-C, sends nothing: the loop fails, and the ticks tell the others.
        result = call()
    except PeerError:
        raise  # the other ranks do not wait for this one: they get the same error, or are the reason for it
    except Exception as error:
        # The other ranks wait for the outcome of this one, so it is sent before the error goes on its way.
        text = str(error) if isinstance(error, CheckpointError) else brief(error)
        ranks.gather((None, (isinstance(error, DamagedCheckpointError), text)), purpose)
        mark_as_known(error)
        raise
    outcomes = ranks.gather((sent(result), None), purpose)
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            is_damaged, text = failure
            peer_error = (DamagedCheckpointError if is_damaged else CheckpointError)(f"on rank {rank}: {text}")
            add_note(peer_error, f"torchhooks: in the step {purpose!r}, which all ranks make together")
            raise peer_error
    return result, [value for value, _ in outcomes]


def writes_for_all(ranks: Ranks) -> bool:
    """Return whether this process reads and writes for all ranks: the chief, and any process that is alone."""
    return ranks.is_chief or not ranks.is_connected

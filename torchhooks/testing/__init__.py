"""Tools for testing hooks, and training scripts.

For hooks: a fake clock, a hook and a writer that record their calls, a small training loop. For scripts:
:func:`assert_resumes_exactly` and :func:`assert_same_run`.

Three tests of ``StopWhenGood``, the example in :mod:`torchhooks.lifecycle.hook`, that do not sleep and write no files:

    from torchhooks.testing import RecordingHook, trace

    def test_stops_in_the_run_that_got_below_the_target():
        assert trace(StopWhenGood(0.2), losses=[0.5, 0.3, 0.1, 0.05]).steps == [1, 2, 3]

    def test_says_why_it_stopped():
        assert "loss 0.100" in trace(StopWhenGood(0.2), losses=[0.5, 0.3, 0.1]).stop_reason

    def test_the_hooks_after_it_still_see_the_last_run():
        after = RecordingHook("global_step")
        trace(StopWhenGood(0.2), after, losses=[0.1])
        assert ("after_run", 1, 1) in after.calls

These are working implementations, not mocks: :func:`trace` runs a real :class:`torchhooks.MonitoredLoop`. To use a
step or a clock of your own, create the loop inside ``with FakeClock() as clock, log_lines() as lines:``.

Read ``recording`` first.
"""

import typing

from torchhooks.testing.recording import FakeClock, RecordingHook, RecordingWriter, Trace, log_lines, plain, trace

if typing.TYPE_CHECKING:
    from torchhooks.testing.proof import assert_resumes_exactly, assert_same_run
else:  # not for type checkers, which would let every name pass

    def __getattr__(name: str) -> object:
        """Return a function of ``proof``, which keeps ledgers, and is imported on request."""
        if name not in ("assert_resumes_exactly", "assert_same_run"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from torchhooks.testing import proof

        return getattr(proof, name)


__all__ = [
    "FakeClock",
    "RecordingHook",
    "RecordingWriter",
    "Trace",
    "assert_resumes_exactly",
    "assert_same_run",
    "log_lines",
    "plain",
    "trace",
]

"""Watching a loop from a thread: when it stands still, where each rank is, and the report that says so.

Read ``stalls`` first: it decides when a loop stands still, and reports it. ``places`` finds out where a thread is, and
what the child processes do. ``report`` is what a person reads. ``commands`` has ``python -m torchhooks stacks``.
"""

"""``MonitoredLoop`` and its parts. Hooks know none of this package.

Read ``monitored_loop`` first, then ``runner``, whose ``begin`` and ``finish`` read as the lifecycle of one run.
``schedule`` chooses the hooks of a run by their triggers, ``requests`` checks and records what they request,
``until_stop`` iterates over items, ``sessions`` creates a session and restores it, ``caught`` tells errors that the
script has caught from one that leaves the loop, ``body`` is the form ``with loop.step()``, ``arguments`` checks what
the loop is created with, and ``rank_sync`` keeps it in step with the other ranks.
"""

"""``MonitoredLoop`` and its parts. Hooks know none of this package.

Read ``monitored_loop`` first, then ``run``, whose ``Lifecycle.run`` reads as the lifecycle of one run. ``schedule``
decides which hooks take part in it, ``data`` iterates over items, ``session_creator`` makes a session and restores it,
and ``peers`` follows the other ranks.
"""

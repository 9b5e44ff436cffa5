"""Where a loop is: its global step, and its place in the data.

Read ``position`` first: it says what a checkpoint contains of the place in the data, and how another process continues
there. ``place`` is one open ``until_stop`` loop, and ``progress`` the global step.
"""

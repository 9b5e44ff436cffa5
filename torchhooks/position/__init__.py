"""Where a loop is: its global step, and its place in the data.

Read ``position`` first: it says what a checkpoint contains of the place in the data. ``place`` is one ``until_stop``
loop and its state, ``resuming`` decides how another process continues there, and ``starting`` skips the items that are
done. ``progress`` is the global step.
"""

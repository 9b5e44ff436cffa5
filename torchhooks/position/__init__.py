"""Where a loop is: its global step, its place in the data, and the script's own variables.

Read ``position`` first: it says what a checkpoint contains of the place in the data. ``place`` is one ``until_stop``
loop and its state, ``resuming`` decides how another process continues there, and ``starting`` skips the items that are
done. ``progress`` is the global step, and ``variables`` is what a script puts its own variables into.
"""

"""The data of a loop: how far each ``until_stop`` is, how another process continues there, and the script's variables.

Read ``cursor`` first: it says where the body of a loop can be, and what a save there counts as done. ``position`` has
the cursors of all open loops, and says what a checkpoint contains. ``resuming`` decides how another process continues
there, and takes the items that are done. ``loaders`` keeps the states of what is iterated. ``agenda`` has what waits
to be done between two runs, and ``variables`` is what a script puts its own variables into.
"""

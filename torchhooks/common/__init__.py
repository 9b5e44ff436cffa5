"""What every other package uses, and what knows nothing of training: errors, the log, checks of arguments, timers,
random states, files, and trees of tensors.

Read ``errors`` first: its docstring draws the tree of exceptions. ``timers`` has the policies by which a periodic hook
is due.
"""

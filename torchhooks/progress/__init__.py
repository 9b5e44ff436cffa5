"""The state of a loop, which all packages above know: what is trained, how far it is, and what stops it.

Read ``training_state`` first: it has all that the parts of a loop, its hooks, savers and tools share. ``loop_state`` is
the part of it that every step reads: the phase, the step, when a hook is due, who stops the loop and why. ``signals``
are those that stop a loop.
"""

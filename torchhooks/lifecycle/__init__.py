"""The contract between a loop and its hooks.

Read ``hook`` first: its docstring describes the order of calls, what stops a loop, and what an exception does.
``trigger`` says when the loop calls a hook, and whether the hook is due. ``session`` is what hooks receive,
``coordinator`` what their threads use, ``settings`` what a loop was given, and ``recovery`` decides after which errors
it continues. ``extension`` is the seam for tools, which join every loop. What a session shares with its loop stands in
:mod:`torchhooks.progress`, and what to know before changing a hook in :mod:`torchhooks.hooks`.
"""

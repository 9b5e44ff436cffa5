"""The contract between a loop and its hooks.

Read ``hook`` first: its docstring describes the order of calls, what stops a loop, and what an exception does.
``trigger`` says when the loop calls a hook, and whether the hook is due. ``session`` is what hooks receive,
``coordinator`` what their threads use, ``settings`` has the numbers and words of a loop, and ``recovery`` decides after
which errors it continues. ``extension`` is the seam for tools, which join every loop. The facts that a hook depends on
are listed in :mod:`torchhooks.hooks`.
"""

"""The contract between a loop and its hooks.

Read ``hook`` first: its docstring describes the order of calls, what stops a loop, and what an exception does.
``session`` is what hooks receive, ``coordinator`` what their threads use, ``loop_state`` keeps the state of a loop, and
``recovery`` decides after which errors it continues.
"""

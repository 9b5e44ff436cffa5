"""What hooks can ask for in a run, and how it is evaluated.

Read ``fetch`` first: its docstring is the table of fetches, and its ``Evaluator`` computes their values.
``accumulated`` has the values that grow from run to run, ``watch`` the outputs of submodules, and ``over_ranks`` the
values of all ranks.
"""

"""What hooks can ask for in a run, and how it is evaluated.

Read ``evaluation`` first: its ``Evaluator`` computes the values of fetches. ``names``
reads what has a name, ``watch`` the outputs of submodules, ``running`` the values that grow from run to run, and
``over_ranks`` the values of all ranks.
"""

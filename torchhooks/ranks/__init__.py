"""The processes that train one model together.

Read ``ranks`` first: the public ``Ranks``, and what a loop makes of it. ``transport`` moves bytes between processes.
``agreement`` has the rules by which ranks agree on their last run, as pure functions. ``failures`` recognizes the
errors that another rank caused, and ``dtensors`` knows the tensors of which each rank has a part.
"""

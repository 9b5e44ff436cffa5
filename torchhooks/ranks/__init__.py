"""The processes that train one model together.

Read ``ranks`` first: the public ``Ranks``, and what a loop makes of it. ``transport`` moves bytes between processes.
``agreement`` has the rules by which ranks agree on their last run, without threads: the tables of all ranks, and the
round that this rank knows of. ``peers`` has the thread that talks to the other ranks, and where the training thread
waits for them.
"""

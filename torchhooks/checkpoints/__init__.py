"""What is saved, in which format, and when a checkpoint is whole.

Read ``saver`` first, then ``state``, which lists the entries of a checkpoint, and ``files``, which describes how one is
written. ``per_rank`` and ``sharded`` are for several ranks. ``gradients`` notes what has accumulated between two steps
of the optimizer.
"""

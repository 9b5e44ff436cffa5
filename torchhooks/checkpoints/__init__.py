"""What is saved, in which format, and when a checkpoint is whole.

Read ``saver`` first. ``plan`` decides whether a CheckpointSaverHook saves. ``saving`` and ``restoring`` have the two
flows of a saver, ``contents`` the entries of a checkpoint, ``comparing`` what does not fit, ``folder`` how a
checkpoint becomes whole, ``reading`` what needs no saver, ``sharded`` what several ranks have in parts, and ``steps``
what all ranks do together.
"""

"""What is saved, in which format, and when a checkpoint is whole.

Read ``saver`` first. ``plan`` decides whether a CheckpointSaverHook saves. ``saving`` and ``restoring`` have the two
flows of a saver, ``contents`` the entries of a checkpoint, ``comparing`` what does not fit, ``folder`` how a checkpoint
becomes whole, ``reading`` what needs no saver, ``sharded`` what several ranks have in parts, ``steps`` what all ranks
do together, ``savers`` what a saver of the script may lack, and ``unsaved`` what trains and is in no checkpoint.

What to know before changing a save. :mod:`torchhooks.data` has the same list for a resume.

Whether and when:

1. ``plan_save`` decides alone, and changes nothing. Its rows are in an order, and those above ASK need no other rank.
2. A save that is due waits for the end of the item, and comes last there: what other hooks do then belongs to it. At a
   stop it is made before code of the script after the loop, and once more in ``end`` only if there is something new.
3. From the first ``until_stop`` of a resumed script until the loop of its checkpoint begins, nothing is saved, whatever
   asks: ``plan_save`` and ``Saver.save`` look at ``position.is_repeating``. So retention keeps the restored one.
4. ``session.why_no_checkpoint`` asks the guards, after the pending ``when_ready`` calls. In the background, the thread
   that writes asks what could not be answered without waiting for the device.
5. A finished training run is noted in the last checkpoint if the contents are the same, by ``digest_of_state``:
   versions of tensors miss a change through ``.data``.

What is in it:

6. ``collect`` reads everything, in the training thread. What writes gets copies, and reads nothing of the training run.
7. Random states are read last: a ``state_dict`` may draw from them.
8. An entry that is not the state of an object is in ``contents.OWN_ENTRIES``, which says what a new one needs.
9. Only plain data are written, so that ``weights_only=True`` reads them. All problems are in one error.
10. A part is replicated, sharded or of each rank: ``belongs_to_rank`` and ``sharded_parts`` say which, and who writes.
11. The position depends on where the script is: in an item of the body, an item counts as done if it had a run.
12. Gradients belong to it that the optimizer has not used. Those that FSDP2 has not reduced are left out: a save that
    is due waits for the next step once, and a stop does not.

How it is written:

13. Each step of several ranks goes through ``steps``: it fails on all of them or on none. Nothing gathers in a step.
14. The folder gets its name last. Before that, each file is synced, and the manifest is written. A kill leaves a folder
    with a temporary name, which the next save removes once its process is gone.
15. The ``order`` in the manifest says which checkpoint is the newest, and not the step or the time.
16. Older checkpoints are removed after the new one has its name. The first of each period of hours is kept for good.
17. Curves are flushed before a save: after a kill, the resumed process does not write their points again.
18. One save at a time. The next call raises the error of the thread, after its own checkpoint is on its way.
19. ``session.savers`` has every saver, each of which is waited for before a restore, and closed at the end.
20. Listeners are called after ``last_save`` is set: one of them may raise, and ``end`` must not save again.
"""

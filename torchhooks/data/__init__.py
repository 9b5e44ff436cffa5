"""The data of a loop: how far each ``until_stop`` is, how another process continues there, and the script's variables.

Read ``cursor`` first: it says where the body of a loop can be, and what a save there counts as done. ``position`` has
the cursors of all open loops, and says what a checkpoint contains. ``resuming`` decides how another process continues
there, and takes the items that are done. ``loaders`` keeps the states of what is iterated. ``agenda`` has what waits
to be done between two runs, and ``variables`` is what a script puts its own variables into.

What to know before changing a resume. :mod:`torchhooks.checkpoints` has the same list for a save.

What is restored, and in which order:

1. Everything is compared before anything is loaded: an error leaves the objects as they were.
2. Loaded are the objects, gradients, step and runs, running values, the position, and last the random states: all of
   the others may draw from them.
3. State is loaded into the dicts of ``param_groups`` that exist: the script may have references to them.
4. If another number of ranks has saved it, what belongs to one rank is left out, and of the position only the outer
   loops are left.
5. A damaged checkpoint is passed over for an older one, with a warning. If all are damaged, that is an error.
6. The session begins at the restored step: ``begun_at``, and each hook's trigger right before its
   ``after_create_session``, because the hook before it may have set the step.
7. A hook is told of a restore by nothing but its state and ``session.was_restored``. ``init_fn`` is not called.

Where the data continue:

8. A cursor is found again by its depth and its order: the number of the loop within the item of the outer one.
9. In the saved path, all cursors but the last are in an item, which is yielded again. The last one continues.
10. ``plan_resume`` looks at the data, and changes and logs nothing. ``lines_of`` a plan are logged, then it is made.
11. An iterable that continues by a state of its own may refuse it at the last moment: ``plan.otherwise`` skips instead.
12. Items that are done are taken again and dropped, with the random states from before ``iter()``. A range is cut.
13. Random states are set once for a loop, after its items were skipped, in ``DataPosition._carry_out``. Only the
    ``iter()`` of a loop that is not resumed comes later.
14. Between two inner loops of one item, the body continues with the random states after the first one.
15. Generators of loaders are set again after the skip, which draws from them.
16. A signal ends a skip, which may take minutes: ``notice_stop`` is asked for each item.
17. In a recovery the data continue where they are: ``load_state_dict`` does nothing after the first ``until_stop``.
    Only the item in progress forgets its run.

Code that is run again:

18. ``way_back`` says where the script is: done, on the way, or past the loop of the checkpoint. On the way nothing is
    saved. Past it, saving is on again, with a warning: ``give_up_repeating``.
19. Where that loop continues, the checkpoint is read and loaded a second time, as repeated code has changed the state.
    Not hooks, nor data that are being iterated, and the step only if runs were made on the way.
20. What the script has set before its first ``until_stop`` is kept, entry by entry, compared by contents.

Training runs that are finished:

21. ``Finish`` names the number of runs at which it was noted: one more run makes it void.
22. The data had ended, or the script has left its loop: the first goes on if there are more items on all ranks, the
    second only if its checkpoint is named, which is ``train_on``.
23. Before the first run, hooks are asked too: ``why_finished``. All ranks decide on such a stop at once.
24. The place of a finished run is in the loop that trained, and not in a later one, such as that of a last test.
25. The counters of epochs and the number of the last item continue, also where the data start over.
"""

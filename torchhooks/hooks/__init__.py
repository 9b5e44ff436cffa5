"""The standard hooks, one file for each theme.

Read ``calling`` first: ``CallFnHook`` is the smallest with a period. Hooks know the session, and never the loop.

What to know before changing a hook, or writing one. What an attribute or a method asks for stands in its docstring, in
:mod:`torchhooks.lifecycle.hook`. The trigger, :mod:`torchhooks.lifecycle.trigger`, owns 1 to 9.

When it is called, and whether it is due:

1. The loop calls a hook in the first run that reaches what ``next_due`` has returned; ``None`` means every run.
2. Called is not due: a hook may be called earlier than it has asked for, which must be harmless.
3. A hook that overrides ``before_run`` is chosen before the step, for ``global_step + 1``; another one after it.
4. A PeriodicHook has a timer, which says when, and remembers the last trigger. ``trigger.due`` says what follows.
5. ``fire`` begins a new period. It comes before ``run_due``, and that after an overridden ``after_run``.
6. ``trigger.force()`` has the next run be due, called outside of a run; ``withdraw()`` has a later one be due.
7. A run that counts no step is not due for a hook with ``needs_step``, and evaluates nothing for it.
8. The end of an epoch comes between two runs: no step, no arguments, no feed, the last outputs, and always due.
9. ``Due.when`` is asked after the step: too late to feed, to trace and to watch a submodule.

What it is called with:

10. ``attach_to_loop`` comes first, with the ranks and the folder of the loop. It is called again in the next loop.
11. ``begin`` comes once a loop, and an instance may serve several loops in turn: reset in it what counts.
12. A recovery makes a new session, and calls ``after_create_session`` again. A run that failed gets no ``after_run``.
13. Exactly ``StopIteration`` ends the loop cleanly. After another error there is no ``end``; ``teardown`` always comes.
14. A running fetch has to be in an attribute or in ``fetches``, so that it covers the runs from the first on.
15. What ``when_ready`` delivers belongs to an earlier run: bind the step, and read nothing of the session in it.
16. What changes or saves the state waits for the end of the item: ``after_item``; the last call of a hook counts.
17. Evaluate in ``session.paused()`` and ``evaluating(session)``: neither rates nor random states may notice.

What it has to tell:

18. A state is kept with ``state_dict``, under ``name``, an attribute for nothing else. The saver has to come later.
19. ``session.guard_checkpoints`` takes what can refuse a checkpoint, in the background without waiting for the device.
20. ``why_finished`` is asked of a restored session. After one that ``was_finished``, ``end`` reports nothing twice.
21. ``end`` leaves out what belongs to the end of the training run if a signal has stopped it (``stopped_by_signal``).
22. A writer has to get the START of a session before any point: a hook that writes is called in the first run.

Several ranks:

23. Only the chief writes and logs: ``writes``.
24. All ranks call a hook in the same run if it is due by steps. By the clock or a signal, if it is ``collective``.
25. What gathers needs the hook on all ranks, in one order, and stands neither in ``teardown`` nor in a callback of
    ``when_ready``.
"""

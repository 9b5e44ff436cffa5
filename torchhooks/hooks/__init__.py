"""The standard hooks, one file for each theme.

Read ``stopping`` first, which has the smallest. Hooks know the session, and never the loop.

What to know before changing a hook, or writing one. :mod:`torchhooks.lifecycle.trigger` owns 1 to 12.

When it is called, and whether it is due:

1. The loop calls a hook in the first run that reaches what ``next_due`` has returned; ``None`` means every run.
2. Called is not due: a hook may be called earlier than it has asked for, which must be harmless.
3. A hook that overrides ``before_run`` is chosen before the step, for ``global_step + 1``; another one after it.
4. A PeriodicHook has a timer, which says when, and remembers the last trigger. ``trigger.due`` says what follows.
5. ``fire`` begins a new period. It comes before ``run_due``, and that after an overridden ``after_run``.
6. A trigger fires once for a step. With ``counts_runs``, it is for runs, of which one that failed counts none.
7. ``trigger.force()`` has the next run be due, ``withdraw()`` a later one.
8. A run that counts no step is not due for a hook with ``needs_step``, and evaluates nothing for it.
9. With ``triggers_at_once``, TensorFlow's rule, the first run is due. Otherwise a period begins with the session.
10. The end of an epoch comes between two runs: no step, no feed, the outputs of the last run, and always due.
11. ``Due.when`` is asked after the step: too late to feed, to trace and to watch a submodule.
12. A hook that sets the global step has the hooks after it chosen once more.

What it is called with:

13. ``begin`` comes once a loop, and an instance may serve several loops in turn: reset in it what counts.
14. A recovery makes a new session, and calls ``after_create_session`` again. A run that failed gets no ``after_run``.
15. Exactly ``StopIteration`` ends the loop cleanly. After another error there is no ``end``; ``teardown`` always comes.
16. A running fetch has to be in an attribute or in ``fetches``, so that it covers the runs from the first on.
17. What ``when_ready`` delivers belongs to an earlier run: bind the step, and read nothing of the session in it.
18. What changes or saves the state waits for the end of the item: ``after_item``; the last call of a hook counts.
19. ``session.at_stop`` is called where a stop is noticed, before code of the script after the ``for`` loop.
20. Evaluate in ``session.paused()`` and ``evaluating(session)``: neither rates nor random states may notice.

What it has to tell:

21. A state is kept with ``state_dict``, under ``name``. The hook has to precede the saver in the list.
22. ``session.guard_checkpoints`` takes what can refuse a checkpoint, in the background without waiting for the device.
23. ``why_finished`` is asked of a restored session. After one that ``was_finished``, ``end`` reports nothing twice.
24. ``end`` leaves out what belongs to the end of the training run if a signal has stopped it (``stopped_by_signal``).
25. ``fetches_to_come`` is checked after the first run, and ``works_at_end`` keeps "was never due" from being logged.
26. The session asks ``stops_at_step``, ``saved_step`` and ``measured_speed``. What a tool should look into, such as a
    NaN, is a ``Finding``: ``session.found``.
27. A writer has to get the START of a session before any point: a hook that writes is called in the first run.

Several ranks:

28. Only the chief writes and logs (``writes``). The folder and the ranks are known before ``begin``.
29. All ranks call a hook in the same run if it is due by steps. By the clock or a signal, if it is ``collective``.
30. What gathers needs the hook on all ranks, in one order.
31. ``teardown`` and what ``when_ready`` calls must not gather.
"""

"""``MonitoredLoop`` and its parts. Hooks know none of this package.

Read ``monitored_loop`` first, then ``runner``, whose ``begin`` and ``finish`` read as the lifecycle of one run, and
``boundaries``, which is the order of what happens between two runs. ``life`` is the order at the two ends of a loop.

``schedule`` chooses the hooks of a run by their triggers, ``requests`` checks and records what they request,
``until_stop`` iterates over items, ``epoch_end`` calls the hooks for the end of an epoch, ``sessions`` makes the state
of a loop, creates its session and restores it, ``recoveries`` recovers from an error or leaves it to the script,
``caught`` tells errors that the script has caught from one that leaves the loop, ``first_runs`` has the checks of the
first runs, ``advice`` says what a script probably does not mean, ``body`` is the form ``with loop.step()``, and
``rank_sync`` keeps the loop in step with the other ranks.

Each part of a loop gets the same few objects: ``training``, the state of the loop
(:mod:`torchhooks.progress.training_state`), its ``schedule`` of hooks, the ``sessions``, and ``rank_sync`` if there are
several ranks. It keeps no copy of what one of them has. What the loop was given is in
:class:`torchhooks.lifecycle.settings.LoopSettings`, and what it begins with in its ``plan``.

What to know before changing what happens between two runs:

1. What waits is in the ``Agenda``. Three things that other threads set are not: ``LoopState.pending``, the triggers of
   ``Schedule``, the values of ``Readback``.
2. ``boundaries`` has all lines in one order, each with its reason in the table: one line, one test.
3. Hooks are called there by ``_make`` alone. The phase is ``RUNNING`` then, so no call begins a run.
4. An error in it is left to the script and never recovered from; exactly ``StopIteration`` ends the loop cleanly.
5. An error of ``end_run`` is one of the run, which a recovery makes again. One of ``after_run`` is not.
6. A recovery is made in a run, from an error of a thread, and while a session is created: see ``recoveries``.
7. After an error that the script catches, the phase is that before the run. ``caught`` notices it at the next boundary,
   after the calls of the item: what is counted there is not in the checkpoint that one of these has just saved.
8. A request to stop becomes a stop while its run still has its number, so that all ranks stop in one run. Later ones
   wait for a boundary.
9. An epoch is taken from the agenda before its hooks are called, which may come back to it. If one of them raises, the
   others are not called for it. A saver that is due by epochs is one of them, unless an item is open around the loop.
10. ``close_loop`` alone notices that an epoch has ended. After a ``break`` no run is idle until its hooks were called.
11. The call of the last item of an inner loop is postponed to the end of the outer item, unless the loop stops.
12. A call that returns ``False`` has something left for the stop. One for the stop replaces the hook's for the item.
13. In a run no place of a stop is kept. In a run, and after an end of the loop, no hook is called: ``is_between_runs``.
14. ``Point`` says where the script is when the position is taken, which decides what counts as done.
15. ``end_epoch`` does not replace the session: its callers go on with the one that they have.
16. In a function of ``run_step_fn``, errors are left to the function, and threads are not looked at.
17. At the close each call has its own attempt: see ``life``.
18. ``tools/watch/places.py`` knows functions of this package by name.
"""

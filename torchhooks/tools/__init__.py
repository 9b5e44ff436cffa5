"""Tools that watch training runs from outside.

``autopsy`` finds out where a NaN came from, ``ledger`` what each run did and whether a script resumes exactly,
``mirror`` keeps a copy of a training run elsewhere, and ``watch`` says why a loop stands still. ``run_record`` is the
file by which a loop tells other processes how far it is.
"""

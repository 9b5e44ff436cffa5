"""Tools that watch training runs from outside. The loop knows none of them.

``plugins`` has the extension by which a tool joins every loop: see :mod:`torchhooks.lifecycle.extension`. ``autopsy``
finds out where a NaN came from, ``ledger`` what each run did and whether a script resumes exactly, ``mirror`` keeps a
copy of a training run elsewhere, and ``watch`` says why a loop stands still. None of these four imports another one.
``commands`` has what they add to ``python -m torchhooks``, and ``run_record`` is the file by which a loop tells other
processes how far it is.

Without this folder, torchhooks works as it does with it, but for the tools.
"""

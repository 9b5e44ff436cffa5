"""What each run did, as digests: a line for each run, and where two training runs part.

Read ``hook`` first: a LedgerHook writes the lines, and a process that resumes compares the runs that it makes again.
``lines`` has the format of the file, ``comparing`` finds the first run in which two ledgers differ, and what that may
come from, and ``commands`` is ``python -m torchhooks diff``.

``check`` runs a script, kills it, and compares it with itself, and ``checked`` is its other half, in the processes of
the script. There, ``walk`` reads all that the script holds, and ``code`` what its variables are for. ``verdict`` says
which differences count, and what they come from. The package is imported on request.
"""

CHECK_PLAN = "TORCHHOOKS_CHECK"
"""The environment variable by which ``check`` names the file that says what happens in a process of the script."""

"""The commands of the tools, for ``python -m torchhooks``."""

from __future__ import annotations

from typing import Any

from torchhooks.tools.autopsy import commands as of_autopsies
from torchhooks.tools.ledger import commands as of_ledgers
from torchhooks.tools.mirror import commands as of_runs
from torchhooks.tools.watch import commands as of_watches


def add_commands(commands: Any) -> None:
    """Add the commands of all tools to the subparsers ``commands``."""
    for tool in (of_autopsies, of_runs, of_ledgers, of_watches):
        tool.add_commands(commands)

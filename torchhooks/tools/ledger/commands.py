"""The command ``diff`` of ``python -m torchhooks``."""

from __future__ import annotations

import argparse
import math
from typing import Any

from torchhooks.common.text import json_text, plain, print_error
from torchhooks.tools.ledger.check import Options, check
from torchhooks.tools.ledger.comparing import DIFFERENT, NOT_COMPARABLE, SAME, as_plain, compare_ledgers, lines_of
from torchhooks.tools.ledger.lines import LedgerError, read_ledgers


def add_commands(commands: Any) -> None:
    """Add the command to the subparsers ``commands`` of ``python -m torchhooks``."""
    command = commands.add_parser("diff", help="say where two training runs with a LedgerHook part")
    command.add_argument("one", help="the folder of a training run")
    command.add_argument("other", help="the folder of another one")
    command.add_argument(
        "--rtol",
        type=_tolerance,
        help="compare the numbers that the step returned, up to this relative difference, instead of bits",
    )
    command.set_defaults(call=lambda given: diff(given.one, given.other, given.rtol, given.json))
    command = commands.add_parser("check", help="say whether a script resumes exactly: run it, kill it, compare")
    command.add_argument("script", nargs="?", help="the training script; put its own arguments at the end, after --")
    command.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does, and no script")
    command.add_argument("--steps", type=int, default=60, help="how many runs to compare (default: %(default)s)")
    command.add_argument(
        "--epoch-items",
        type=int,
        default=8,
        help="limit epochs to so many items, if none ends within the steps; 0 for no limit (default: %(default)s)",
    )
    command.add_argument("--kills", type=int, default=0, help="kill it in so many more runs (default: %(default)s)")
    command.add_argument(
        "--nproc-per-node", type=int, default=1, metavar="N", help="run it in N processes, as torchrun would"
    )
    command.add_argument("--ignore-output", action="store_true", help="do not compare what the script prints")
    command.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATH",
        help="a variable that may start over, such as seen or Trainer.seen; may be repeated",
    )
    command.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECS",
        help="how long a process of the script may take (default: %(default)g)",
    )
    command.add_argument("--keep", action="store_true", help="keep the scratch folder, and say where it is")
    command.set_defaults(call=_check)


def _tolerance(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    # NaN is refused too, because every comparison with it is false.
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from 0 on and less than 1, such as 1e-5")
    return number


def _check(given: argparse.Namespace) -> int:
    if (given.script is None) == (given.module is None):
        print_error("check: give a script, or -m and the name of a module", given.json)
        return NOT_COMPARABLE
    what = [given.script] if given.module is None else ["-m", given.module]
    options = Options(
        given.steps,
        given.epoch_items,
        given.kills,
        given.nproc_per_node,
        given.ignore_output,
        given.ignore,
        given.timeout,
    )
    return check([*what, *given.arguments], options, given.json, given.keep)


def diff(one: str, other: str, rtol: float | None = None, as_json: bool = False) -> int:
    """Print where two training runs part. Return 0 if they are the same, 1 if not, 2 if they cannot be compared."""
    try:
        found = compare_ledgers(read_ledgers(one), read_ledgers(other), rtol)
    except (LedgerError, OSError) as error:
        print_error(str(error), as_json)
        return NOT_COMPARABLE
    if as_json:
        print(json_text(as_plain(found)))
    else:
        for name, text in lines_of(found):
            print(plain(f"{name:15}{text}"))
    return SAME if found.difference is None else DIFFERENT

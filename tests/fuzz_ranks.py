"""Try many random schedules of the agreement: ``python tests/fuzz_ranks.py --schedules 5000 --seed 1``."""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import time

from support.rank_threads import Schedule, check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("torchhooks").setLevel(logging.CRITICAL)
    sys.setswitchinterval(1e-5)  # threads interleave more
    begin, ends = time.monotonic(), collections.Counter[str]()
    for seed in range(arguments.seed, arguments.seed + arguments.schedules):
        ends[check(Schedule.drawn(seed))] += 1
    print(f"{dict(ends)} in {time.monotonic() - begin:.0f} s, seeds from {arguments.seed}")


if __name__ == "__main__":
    main()

"""Tests of ``check`` without processes of their own, which take seconds to import torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from torchhooks.ledger import processes


def use_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every process of a script as a fork of this one. So a set has the same order in all of them."""

    def fork(command: list[str], variables: dict[str, str], outputs: str, ranks: int) -> tuple[int, int]:
        def of_rank(rank: int) -> int:
            own = {**variables, **environments[rank]}
            return processes.run_in_fork(command, own, f"{outputs}{rank}", f"{outputs}{rank}.written")

        environments = processes.environments_of_ranks(ranks)
        with ThreadPoolExecutor(ranks) as pool:
            codes = [*pool.map(of_rank, range(ranks))]
        failed = next((rank for rank, code in enumerate(codes) if code), 0)
        return codes[failed], failed

    monkeypatch.setattr(processes, "run_in_new_processes", fork)

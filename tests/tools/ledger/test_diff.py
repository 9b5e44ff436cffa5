"""``python -m torchhooks diff`` on ledgers that are written by hand: what it compares, and what it leaves out."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.schemas import answer

from torchhooks.__main__ import main, parsers
from torchhooks.common.digests import WIDTH
from torchhooks.tools.ledger.comparing import compare_ledgers, differing_environment, differing_parts
from torchhooks.tools.ledger.lines import FORMAT, LedgerError, LedgerFile, Omissions, read_ledgers

DEFAULT = {"item": "i" * WIDTH, "arguments": "a" * WIDTH, "random": {"torch": "t"}, "outputs": "o" * WIDTH}


def head(resumed_at: int = 0, loop: int = 1, process: int = 1, **environment: Any) -> dict[str, Any]:
    """Return the line that a process begins with."""
    return {"ledger": FORMAT, "process": process, "loop": loop, "resumed_at": resumed_at, **environment}


def run(number: int, loop: int = 1, process: int = 1, loss: float | str | None = 0.5, **digests: Any) -> dict[str, Any]:
    """Return the line of a run. A digest that is ``None`` is missing."""
    place = {"loop": loop, "run": number, "step": number, "epoch": 0, "batch": number - 1, "process": process}
    kept = {name: digest for name, digest in {**DEFAULT, **digests}.items() if digest is not None}
    values = {} if loss is None else {"loss": loss}
    return {**place, "digests": kept, "values": values, "drawn": ["torch"], "format": FORMAT}


def runs(first: int, last: int, **options: Any) -> list[dict[str, Any]]:
    return [run(number, **options) for number in range(first, last + 1)]


def only(**digests: Any) -> dict[str, Any]:
    return {**dict.fromkeys(DEFAULT), **digests}


def write(folder: Path, *lines: Mapping[str, Any] | bytes, rank: int = 0, spaced: bool = False) -> Path:
    """Write a ledger as a LedgerHook does; ``spaced``, as json.dumps does, which the fast way to read does not know."""
    path = folder / "ledger" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    separators = None if spaced else (",", ":")
    texts = [line if isinstance(line, bytes) else json.dumps(line, separators=separators).encode() for line in lines]
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return folder


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that calls ``diff``, and returns its status and what it prints."""

    def call(one: Path, other: Path, *options: str) -> tuple[int, str]:
        asked = parsers()[0].parse_args(["diff", str(one), str(other), *options])
        code = asked.call(asked)  # main() itself would turn a ValueError into a status
        out, err = capsys.readouterr()
        return code, out + err

    return call


def keys(folder: Path) -> list[tuple[int, int]]:
    return [(entry.loop, entry.run) for entry in read_ledgers(folder)[0]]


def omissions(folder: Path) -> Omissions:
    return read_ledgers(folder)[0].omissions


# -- what was compared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spaced", [False, True])
def test_with_a_tolerance_outputs_are_not_said_to_have_the_same_bits(
    spaced: bool, tmp_path: Path, printed: Any
) -> None:
    one = write(tmp_path / "a", head(), *runs(1, 3, parameters="p"), spaced=spaced)
    other = write(tmp_path / "b", head(), *runs(1, 3, loss=0.5000001, outputs="x", parameters="q"), spaced=spaced)
    assert printed(one, other, "--rtol", "1e-5") == (
        0,
        "environment    the same\n"
        "the same bits  3 runs: item, arguments, random\n"
        "within 1e-05   3 runs: the numbers in outputs\n"
        "not compared   parameters\n",
    )
    told = answer("diff", printed(one, other, "--rtol", "1e-5", "--json")[1])
    assert (told["rtol"], told["not_compared"]) == (1e-5, ["parameters"])
    assert told["runs_by_quantity"] == dict.fromkeys(["item", "arguments", "random", "outputs"], 3)


def test_with_a_tolerance_outputs_without_a_number_are_not_compared(tmp_path: Path, printed: Any) -> None:
    one = write(tmp_path / "a", head(), run(1, loss=None))
    other = write(tmp_path / "b", head(), run(1, loss=None, outputs="x"))
    code, text = printed(one, other, "--rtol", "1e-5")
    assert code == 0
    assert "the same bits  1 run: item, arguments, random\nnot compared   outputs\n" in text
    one, other = (write(tmp_path / name, head(), run(1, loss=None, **only(outputs="o"))) for name in ("c", "d"))
    code, text = printed(one, other, "--rtol", "1e-5")
    assert (code, "nothing in common that can be compared with a tolerance" in text) == (2, True)


@pytest.mark.parametrize("tolerance", ["-1", "nan", "1", "x"])
def test_a_wrong_tolerance_is_an_error(tolerance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["diff", "a", "b", f"--rtol={tolerance}"])
    assert "give a number from 0 on and less than 1" in capsys.readouterr().err


def test_an_output_that_is_no_number_is_compared_as_a_text(tmp_path: Path, printed: Any) -> None:
    one, other = (write(tmp_path / name, head(), run(1, loss=f"<int {name}>")) for name in ("a", "b"))
    code, text = printed(one, other, "--rtol", "0.1")
    assert (code, "outputs DIFFER: loss <int a> / <int b>\n" in text) == (1, True)
    assert printed(one, one, "--rtol", "0.1")[0] == 0


def test_ledgers_without_a_common_quantity_cannot_be_compared(tmp_path: Path, printed: Any) -> None:
    one = write(tmp_path / "a", head(), *runs(1, 3, **only(item="i", arguments="a")))
    other = write(tmp_path / "b", head(), *runs(1, 3, **only(parameters="p")))
    code, text = printed(one, other)
    assert code == 2
    assert f"no quantity in common: {one} has item, arguments; {other} has parameters" in text


def test_only_runs_with_a_common_quantity_count_as_compared(tmp_path: Path, printed: Any) -> None:
    one = write(tmp_path / "a", head(), *runs(1, 5, parameters="p"))
    lines = [*runs(1, 1), *runs(2, 3, parameters="p"), *runs(4, 5, **only(state={"head": "s"}))]
    other = write(tmp_path / "b", head(), *lines)
    code, text = printed(one, other)
    assert code == 0
    assert "the same bits  3 runs: item, arguments, random, outputs, parameters (2 runs)\n" in text
    assert "not compared   state, 2 runs without a quantity that both have\n" in text
    told = answer("diff", printed(one, other, "--json")[1])
    assert (told["runs"], told["runs_not_compared"], told["runs_by_quantity"]["parameters"]) == (3, 2, 2)


def test_a_cause_claims_nothing_of_what_was_not_compared(tmp_path: Path, printed: Any) -> None:
    one = write(tmp_path / "a", head(), run(1, gradients="g", parameters="p"))
    other = write(tmp_path / "b", head(), run(1, gradients="g", parameters="q"))
    assert "likely cause   The gradients are the same: look for an optimizer" in printed(one, other)[1]
    other = write(tmp_path / "b", head(), run(1, parameters="q"))
    assert "likely cause   With no gradients to compare, look for an optimizer" in printed(one, other)[1]


def test_a_generator_that_neither_has_drawn_from_may_differ(tmp_path: Path, printed: Any) -> None:
    states = [{"torch": "t", "numpy": "n"}, {"torch": "t", "numpy": "m"}, {"torch": "u", "numpy": "n"}]
    one, seeded, drawn = (write(tmp_path / str(n), head(), run(1, random=each)) for n, each in enumerate(states))
    assert printed(one, seeded)[0] == 0
    code, text = printed(one, drawn)
    assert (code, "random DIFFER: torch" in text) == (1, True)


def test_names_are_those_that_the_loop_had_then(tmp_path: Path, printed: Any) -> None:
    def lines(last: str) -> list[dict[str, Any]]:
        first = [{"names": {"parameters": ["x"]}}, run(1, parameters="0" * WIDTH)]
        of_two = "1" * WIDTH + last * WIDTH
        return [head(), *first, {"names": {"parameters": ["y", "z"]}}, run(2, parameters=of_two)]

    one, other = (write(tmp_path / last, *lines(last)) for last in ("2", "3"))
    assert "parameters DIFFER: z\n" in printed(one, other)[1]
    of_other_loop = [{"names": {"parameters": ["x", "y"]}}, run(1, loop=2, parameters="0" * 2 * WIDTH)]
    pair = []
    for last in ("2", "3"):
        before, after = lines("1"), run(3, parameters="1" * WIDTH + last * WIDTH)
        pair.append(write(tmp_path / last, *before, head(loop=2), *of_other_loop, after))
    assert "parameters DIFFER: z\n" in printed(*pair)[1]


# -- stale lines ------------------------------------------------------------------------------------------------------


def test_lines_of_an_older_training_run_in_the_folder_are_left_out(tmp_path: Path, printed: Any) -> None:
    one = write(tmp_path / "a", head(), *runs(1, 100, item="x"), head(process=2), *runs(1, 30, process=2))
    other = write(tmp_path / "b", head(), *runs(1, 30))
    assert keys(one) == [(1, number) for number in range(1, 31)]
    code, text = printed(one, other)
    assert code == 0
    assert "the same bits  30 runs: " in text
    assert "not in both" not in text
    assert f"left out       70 lines of an older training run in {one}\n" in text
    told = answer("diff", printed(other, one, "--json")[1])
    assert told["left_out_of_one"] == {"older": 0, "undone": 0, "unreadable": 0}
    assert told["left_out_of_other"] == {"older": 70, "undone": 0, "unreadable": 0}


STALE = [
    ([head(), *runs(1, 8), head(4), *runs(5, 9)], [*range(1, 10)], (0, 0)),
    ([head(), *runs(1, 8), head(4), *runs(5, 6)], [*range(1, 7)], (0, 2)),
    ([head(), *runs(1, 8), *runs(4, 5)], [*range(1, 6)], (0, 3)),
    ([head(), *runs(1, 8), head(4), *runs(5, 6), head(5), *runs(6, 7)], [*range(1, 8)], (0, 1)),
    ([head(), *runs(1, 8), head(4), *runs(5, 6), head(), *runs(1, 2)], [1, 2], (6, 0)),
    ([head(), *runs(1, 9), head(), *runs(1, 7), head(3), *runs(4, 5)], [*range(1, 6)], (2, 2)),
    ([head(), *runs(1, 3), head(8), *runs(9, 10)], [1, 2, 3, 9, 10], (0, 0)),
    ([*runs(1, 3), head(2), *runs(3, 4)], [1, 2, 3, 4], (0, 0)),
    ([head(), run(3), run(6), run(9), head(6), run(8), run(10)], [3, 6, 8, 10], (0, 1)),
    ([head(), *runs(1, 2), {"ledger": FORMAT}, *runs(3, 4)], [1, 2, 3, 4], (0, 0)),
]


@pytest.mark.parametrize(("lines", "numbers", "left_out"), STALE)
def test_runs_that_a_process_has_undone_are_left_out(
    lines: list[dict[str, Any]], numbers: list[int], left_out: tuple[int, int], tmp_path: Path
) -> None:
    folder = write(tmp_path, *lines)
    assert [number for _, number in keys(folder)] == numbers
    assert omissions(folder) == Omissions(*left_out)


def test_what_no_process_made_again_is_said(tmp_path: Path, printed: Any) -> None:
    one = write(tmp_path / "a", head(), *runs(1, 8), head(4), *runs(5, 6))
    text = printed(one, one)[1]
    assert f"left out       2 lines in {one} of runs that were not made again after a resume\n" in text


def test_the_line_that_was_written_last_counts(tmp_path: Path) -> None:
    folder = write(tmp_path, head(), *runs(1, 8, loss=1.0), head(4), *runs(5, 6, loss=2.0), run(6, loss=3.0))
    assert [entry.values["loss"] for entry in read_ledgers(folder)[0]] == [1.0] * 4 + [2.0, 3.0]


def test_a_start_from_the_beginning_leaves_out_the_loops_after_it(tmp_path: Path) -> None:
    older = [head(), *runs(1, 2), head(loop=2), *runs(1, 5, loop=2), head(loop=3), *runs(1, 2, loop=3)]
    folder = write(tmp_path, *older, head(), *runs(1, 2))
    assert keys(folder) == [(1, 1), (1, 2)]
    assert omissions(folder) == Omissions(older=7)
    folder = write(tmp_path, *older, head(), *runs(1, 2), head(loop=2), *runs(1, 4, loop=2))
    assert keys(folder) == [(1, 1), (1, 2), *((2, number) for number in range(1, 5))]
    assert omissions(folder) == Omissions(older=3)


def test_a_loop_that_continues_after_one_that_began_again_keeps_its_lines(tmp_path: Path) -> None:
    first = [head(), *runs(1, 2), head(loop=2), *runs(1, 5, loop=2)]
    folder = write(tmp_path, *first, head(), *runs(1, 2), head(4, loop=2), *runs(5, 6, loop=2))
    assert keys(folder) == [(1, 1), (1, 2), *((2, number) for number in range(1, 7))]


def test_runs_of_two_loops_in_turns_are_read_in_order(tmp_path: Path) -> None:
    turns = [run(number, loop) for number in range(1, 5) for loop in (2, 1)]
    folder = write(tmp_path, head(), head(loop=2), *turns, run(3, 2))
    assert keys(folder) == [*((1, number) for number in range(1, 5)), (2, 1), (2, 2), (2, 3)]


def test_ranks_of_an_older_training_run_are_left_out(tmp_path: Path, printed: Any) -> None:
    for rank in (0, 1):
        write(tmp_path / "a", head(world_size=2), *runs(1, 5), rank=rank)
    assert [ledger.rank for ledger in read_ledgers(tmp_path / "a")] == [0, 1]
    write(tmp_path / "a", head(world_size=2), *runs(1, 5), head(world_size=1), *runs(1, 5))
    other = write(tmp_path / "b", head(world_size=1), *runs(1, 5))
    code, text = printed(tmp_path / "a", other)
    assert (code, "left out       5 lines of an older training run" in text) == (0, True)


def expected_of(lines: Iterable[dict[str, Any]]) -> tuple[dict[tuple[int, int], int], Omissions]:
    """Return which lines count, by the numbers of loop and run, and how many are left out, in the plainest way."""
    live: dict[tuple[int, int], int] = {}
    older: set[tuple[int, int]] = set()
    undone: set[tuple[int, int]] = set()
    waiting: set[int] = set()  # loops that a new start has not come to
    loops: set[int] = set()

    def cut(loop: int, last: int) -> None:
        gone = {key for key in live if key[0] == loop and key[1] > last}
        undone.update(gone)
        for key in gone:
            del live[key]

    def leave_out(loop: int) -> None:
        cut(loop, -1)
        of_loop = {key for key in undone if key[0] == loop}
        older.update(of_loop)
        undone.difference_update(of_loop)

    for number, line in enumerate(lines):
        loop = line.get("loop", 0)
        if "ledger" in line:
            waiting.discard(loop)
            if line["resumed_at"]:
                cut(loop, line["resumed_at"])
            else:
                leave_out(loop)
                waiting.update(other for other in loops if other > loop)
        elif "run" in line:
            waiting.discard(loop)
            loops.add(loop)
            cut(loop, line["run"])
            live[loop, line["run"]] = number
            undone.discard((loop, line["run"]))
    for loop in waiting:
        leave_out(loop)
    undone -= live.keys()
    return live, Omissions(len(older - live.keys() - undone), len(undone))


def test_the_lines_that_count_are_those_of_the_plain_rules(tmp_path: Path) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        lines: list[dict[str, Any]] = []
        last = dict.fromkeys((1, 2, 3), 0)
        for number in range(draw.choice([5, 40, 120])):
            loop = draw.choice([1, 1, 2, 3])
            what = draw.random()
            if what < 0.12:
                last[loop] = draw.choice([0, draw.randint(0, last[loop] + 1)])
                lines.append(head(last[loop], loop))
            elif what < 0.2:
                lines.append({"names": {"parameters": [draw.choice("ab")]}})
            else:
                step = draw.choice([1, 1, 1, 1, 3, 0, -2, 900])
                last[loop] = max(last[loop] + step, 1)
                lines.append(run(last[loop], loop, loss=number))
        live, left_out = expected_of(lines)
        folder = write(tmp_path, *lines)
        (ledger,) = read_ledgers(folder)
        found = {(entry.loop, entry.run): entry.values["loss"] for entry in ledger}
        assert [*found] == sorted(live), seed
        assert found == {key: lines[place]["values"]["loss"] for key, place in live.items()}, seed
        assert (len(ledger), ledger.omissions) == (len(live), left_out), seed


# -- strange lines ----------------------------------------------------------------------------------------------------

STRANGE: dict[str, Mapping[str, Any] | bytes] = {
    "torn": b'{"loop":1,"run":1,"st',
    "torn between two keys": b'{"loop":1}',
    "no object": b"[1, 2]",
    "a number": b"7",
    "binary": bytes(range(128, 256)).replace(b"\n", b""),
    "NUL bytes": bytes(4096),
    "deep": b"[" * 100_000,
    "deep in a header": b'{"ledger":2,"loop":' + b"[" * 100_000,
    "a huge number": b'{"loop":1,"run":' + b"9" * 5000 + b"}",
    "unknown keys": {**run(2), "of_a_later_version": 1},
    "a missing key": {key: value for key, value in run(2).items() if key != "step"},
    "run is a text": {**run(2), "run": "2"},
    "run is true": {**run(2), "run": True},
    "run is negative": {**run(2), "run": -2},
    "run is huge": {**run(2), "run": 1 << 64},
    "loop is null": {**run(2), "loop": None},
    "step is a number with a comma": {**run(2), "step": 1.5},
    "epoch is a list": {**run(2), "epoch": []},
    "process is a text": {**run(2), "process": "x"},
    "format is a text": {**run(2), "format": "2"},
    "digests is a list": {**run(2), "digests": []},
    "a digest is a number": run(2, item=5),
    "a digest of tensors has names": run(2, parameters={"a": "b"}),
    "random is a text": run(2, random="x"),
    "a state is a number": run(2, random={"torch": 1}),
    "state is a list": run(2, state=[]),
    "values is a list": {**run(2), "values": []},
    "a value is null": {**run(2), "values": {"loss": None}},
    "a value is true": {**run(2), "values": {"loss": True}},
    "a value is a list": {**run(2), "values": {"loss": [1]}},
    "a value is huge": {**run(2), "values": {"loss": 10**400}},
    "drawn is a text": {**run(2), "drawn": "torch"},
    "drawn has a number": {**run(2), "drawn": [1]},
    "names is a list": {"names": ["a"]},
    "names of a text": {"names": {"parameters": "abc"}},
    "names of numbers": {"names": {"parameters": [1]}},
    "the loop of a header is a text": {**head(), "loop": "1"},
    "resumed_at of a header is a list": {**head(), "resumed_at": []},
    "resumed_at of a header is missing": {"ledger": FORMAT, "loop": 1},
}


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE.keys())
def test_a_strange_line_is_passed_over_and_counted(strange: Any, tmp_path: Path, printed: Any) -> None:
    one = write(tmp_path / "a", head(), run(1), strange, run(2), run(3))
    other = write(tmp_path / "b", head(), *runs(1, 3))
    code, text = printed(one, other)
    assert (code, "the same bits  3 runs: " in text) == (0, True)
    assert f"left out       1 line in {one} that cannot be read\n" in text
    told = answer("diff", printed(other, one, "--json")[1])
    assert (told["left_out_of_one"]["unreadable"], told["left_out_of_other"]["unreadable"]) == (0, 1)


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchhooks.tools.ledger.lines._LONGEST", 1 << 12)
    long = b'{"a": "' + b"x" * 10_000 + b'"}'
    padded = json.dumps(run(1)).encode() + b" " * 10_000
    one = write(tmp_path / "a", head(), run(1), long, run(2), bytes(1 << 12), run(3), padded)
    code, text = printed(one, write(tmp_path / "b", head(), *runs(1, 3)))
    assert (code, "the same bits  3 runs: " in text, "3 lines" in text) == (0, True, True)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"  ",
        json.dumps(run(2)).encode(),
        json.dumps(run(2)).encode() + b"\r",
        json.dumps(dict(reversed(run(2).items()))).encode(),
        json.dumps(run(2)).replace('"run": 2', '"run": 7, "run": 2').encode(),
        json.dumps(run(2, random={"torch": "\u00e4"}), ensure_ascii=False).encode(),
        {**head(1), "argv": {"a": [1]}, "device": ["x", None, {}], "torch": 7, "process": "x"},
        {"names": {"a later quantity": ["x"]}},
        run(2, a_later_quantity="x"),
    ],
)
def test_what_can_be_read_is_not_counted_as_strange(line: Any, tmp_path: Path, printed: Any) -> None:
    one = write(tmp_path / "a", head(argv=["x"], torch="2"), run(1), line, run(2), run(3))
    code, text = printed(one, write(tmp_path / "b", head(argv=["x"], torch="2"), *runs(1, 3)))
    assert (code, "the same bits  3 runs: " in text, "left out" in text) == (0, True, False)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\x00" * 100, b"garbage\n{}\n", b'{"loop":1,"run":1'])
def test_a_ledger_without_a_readable_line_cannot_be_compared(data: bytes, tmp_path: Path, printed: Any) -> None:
    other = write(tmp_path / "b", head(), run(1))
    one = write(tmp_path / "a")
    (one / "ledger" / "rank-0.jsonl").write_bytes(data)
    code, text = printed(one, other)
    assert (code, "no ledger with a line that can be read" in text) == (2, True)


def test_a_file_without_a_header_is_compared_and_its_environment_is_not_known(tmp_path: Path, printed: Any) -> None:
    one, other = write(tmp_path / "a", *runs(1, 3)), write(tmp_path / "b", head(), *runs(1, 3))
    code, text = printed(one, other)
    assert (code, "environment    not known" in text) == (0, True)


def test_what_is_not_a_file_cannot_be_compared(tmp_path: Path, printed: Any) -> None:
    other = write(tmp_path / "b", head(), run(1))
    (tmp_path / "a" / "ledger" / "rank-0.jsonl").mkdir(parents=True)
    code, text = printed(tmp_path / "a", other)
    assert (code, "is not a file" in text) == (2, True)
    (tmp_path / "a" / "ledger" / "rank-0.jsonl").rmdir()
    os.mkfifo(tmp_path / "a" / "ledger" / "rank-0.jsonl")
    assert printed(tmp_path / "a", other)[0] == 2


def test_a_file_that_may_not_be_read_is_an_error_of_ledgers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    write(tmp_path, head(), run(1))
    monkeypatch.setattr("torchhooks.tools.ledger.lines.open", refuse, raising=False)
    with pytest.raises(LedgerError, match="cannot be read: Permission denied"):
        read_ledgers(tmp_path)


@pytest.mark.parametrize("newer", [{**head(), "ledger": 3}, {**head(), "ledger": True}, {**run(2), "format": 3}])
def test_a_newer_format_is_an_error(newer: dict[str, Any], tmp_path: Path, printed: Any) -> None:
    one = write(tmp_path / "a", head(), run(1), newer)
    code, text = printed(one, write(tmp_path / "b", head(), run(1)))
    assert (code, "this version of torchhooks reads 2" in text) == (2, True)


@pytest.mark.slow
def test_no_bytes_lead_to_a_traceback(tmp_path: Path, printed: Any) -> None:
    names = {"names": {"parameters": ["x"]}}
    whole = write(tmp_path / "b", head(argv=["a"]), names, *runs(1, 6, parameters="0" * WIDTH), head(4), *runs(5, 7))
    data = (whole / "ledger" / "rank-0.jsonl").read_bytes()
    (tmp_path / "a" / "ledger").mkdir(parents=True)
    for seed in range(60):
        draw, changed = random.Random(seed), bytearray(data)
        for _ in range(draw.randint(1, 5)):
            place, size = draw.randrange(len(changed)), draw.choice([1, 5, 300])
            pieces = [b"", draw.randbytes(size), bytes(size), changed[:size], b'{"ledger":2,"loop":[]}\n', b"[" * 9999]
            changed[place : place + draw.choice([0, size])] = draw.choice(pieces)
        (tmp_path / "a" / "ledger" / "rank-0.jsonl").write_bytes(changed)
        answer("diff", printed(tmp_path / "a", whole, "--json", *draw.choice([[], ["--rtol", "0.1"]]))[1])
        assert printed(whole, tmp_path / "a")[0] in (0, 1, 2), seed


def test_a_hook_reads_a_strange_ledger_without_an_error(tmp_path: Path) -> None:
    write(tmp_path, *STRANGE.values(), head(process=4), run(2, process=4), {"process": "x"})
    file = LedgerFile(str(tmp_path), 0)
    assert file.last_process() == 4
    assert [*file.after(1, 1, 5)[0]] == [2]
    assert file.environment(4)["process"] == 4
    assert file.environment(3) == {}
    file.close()


def test_a_hook_does_not_compare_with_an_older_training_run(tmp_path: Path) -> None:
    write(tmp_path, head(), *runs(1, 9), head(process=2), *runs(1, 3, process=2), head(process=3))
    file = LedgerFile(str(tmp_path), 0)
    assert sorted(file.after(0, 1, 3)[0]) == [1, 2, 3]
    file.close()


# -- memory -----------------------------------------------------------------------------------------------------------


def peak(one: Path, other: Path) -> int:
    tracemalloc.start()
    try:
        compare_ledgers(read_ledgers(one), read_ledgers(other))
        differing_parts(read_ledgers(one), read_ledgers(other), {})
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


KINDS = ["two loops in turns", "two hooks", "an older training run", "spaced"]


@pytest.mark.slow
@pytest.mark.not_measured  # which would take several times as long
@pytest.mark.parametrize("kind", ["one loop", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS)])
def test_a_ledger_of_ten_times_as_many_runs_needs_no_more_memory(kind: str, tmp_path: Path) -> None:
    def lines(last: int) -> list[dict[str, Any]]:
        if kind == "two loops in turns":
            turns = [run(number, loop) for number in range(1, last // 2) for loop in (1, 2)]
            return [head(), head(loop=2), *turns]
        if kind == "two hooks":
            return [head(), *(run(number) for number in range(1, last // 2) for _ in range(2))]
        older = runs(1, last, item="x") if kind == "an older training run" else []
        return [head(), *older, head(), *runs(1, last // (2 if older else 1))]

    peaks = []
    for last in (300, 3_000):
        pair = [write(tmp_path / name, *lines(last), spaced=kind == "spaced") for name in ("a", "b")]
        peaks.append(peak(pair[0], pair[1]))
    assert peaks[1] < peaks[0] + 100_000, "the lines of all runs would take 1 MB or more"


# -- the environment --------------------------------------------------------------------------------------------------


def test_another_argument_is_the_first_cause_that_is_named(tmp_path: Path, printed: Any) -> None:
    common: dict[str, Any] = {"torch": "2.13.0", "device": "cpu"}
    one = write(tmp_path / "a", head(argv=["train.py", "--lr", "0.1", "--seed", "0"], **common), run(1))
    other = write(
        tmp_path / "b",
        head(argv=["train.py", "--seed", "1", "--lr", "0.1"], **common | {"torch": "2.12.0"}),
        run(1, item="x"),
    )
    code, text = printed(one, other)
    differing = ["argv: --seed 0 / --seed 1", "torch: 2.13.0 / 2.12.0"]
    assert code == 1
    assert f"environment    {'; '.join(differing)}\n" in text
    start = f"likely cause   {'; '.join(differing)}. If that is meant to make no difference: the data come in another"
    assert start in text
    told = answer("diff", printed(one, other, "--json")[1])
    assert (told["environment"], told["difference"]["environment"]) == (differing, differing)
    assert told["difference"]["cause"].startswith(differing[0])


def test_the_environments_are_those_of_the_processes_that_made_the_run(tmp_path: Path, printed: Any) -> None:
    one = write(tmp_path / "a", head(device="cpu"), *runs(1, 4))
    lines = [head(device="cpu"), *runs(1, 2), head(2, device="an H200"), *runs(3, 3), run(4, outputs="x")]
    other = write(tmp_path / "b", *lines)
    text = printed(one, other)[1]
    assert "environment    device: cpu / an H200\n" in text
    assert "first differs  step 4" in text
    assert "likely cause   device: cpu / an H200. If that" in text
    other = write(tmp_path / "b", head(device="cpu"), run(1, item="x"), *lines[2:])
    told = answer("diff", printed(one, other, "--json")[1])
    assert told["difference"]["environment"] == [], "the first run was made on the same device"


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (["a.py", "--lr=1"], ["a.py", "--lr=2"], "argv: --lr=1 / --lr=2"),
        (["a.py", "--deep"], ["a.py"], "argv: --deep / nothing"),
        (["a.py", "--lr", "-1"], ["a.py", "--lr", "-2"], "argv: --lr -1 / --lr -2"),
        (["a.py", "x", "y"], ["a.py", "y", "x"], "argv: a.py x y / a.py y x"),
        (["a.py", "seed=0", "lr=1"], ["b.py", "seed=1", "lr=1"], "argv: a.py seed=0 / b.py seed=1"),
        (["a.py", "--name", "my run"], ["a.py", "--name", "run"], "argv: --name 'my run' / --name run"),
        (["a.py", "--fast", "--lr", "1"], ["a.py", "--slow", "--lr", "1"], "argv: --fast / --slow"),
        ("a.py", ["a.py"], "argv: a.py / ['a.py']"),
        ([1], {"x": 2}, "argv: [1] / {'x': 2}"),
    ],
)
def test_only_the_arguments_that_differ_are_shown(one: Any, other: Any, text: str) -> None:
    assert differing_environment({"argv": one}, {"argv": other}) == [text]


def test_what_only_one_environment_says_is_no_difference() -> None:
    assert differing_environment({"torch": "2"}, {"threads": 2}) == []

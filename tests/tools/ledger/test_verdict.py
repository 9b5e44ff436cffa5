"""What a difference comes from, in which order causes are named, and which differences count."""

from __future__ import annotations

from typing import Any

import pytest

from torchhooks.tools.ledger.comparing import Comparison
from torchhooks.tools.ledger.verdict import Suspect, Verdict, Walks, causes, is_ignored, masked, starting_over, text_of
from torchhooks.tools.ledger.walk import Moment, Node, Walked

NODES = {str(number): Node("number", str(number)) for number in range(100)} | {
    "1.5": Node("number", "1.5"),
    "2.5": Node("number", "2.5"),
    "list": Node("container", bag="bag", is_plain=True),
    "list in another order": Node("container", bag="bag", is_plain=True),
    "other list": Node("container", bag="other", is_plain=True),
    "rng": Node("generator"),
    "later rng": Node("generator"),
    "iter": Node("iterator"),
    "later iter": Node("iterator"),
    "model": Node("part", is_part=True),
    "later model": Node("part", is_part=True),
    "word": Node("text", "'word'"),
    "other word": Node("text", "'other'"),
    "None": Node("number", "None"),
    "empty": Node("container", is_plain=True, size=0),
    "filled": Node("container", edges={"['a']": "1"}, is_plain=True, size=1),
    "full": Node("container", edges={"['a']": "model"}, is_part=True, size=1),
    "mode 1": Node("saved", edges={".training": "1"}),
    "mode 0": Node("saved", edges={".training": "0"}),
    "loader 1": Node("object", edges={"._iterated": "1"}, of_library=["._iterated"]),
    "loader 2": Node("object", edges={"._iterated": "2"}, of_library=["._iterated"]),
}


def moment(run: int, is_first: bool = False, saved: str = "s", targets: Any = (), **values: Any) -> Moment:
    return Moment(run, is_first, values, targets, {"head": saved})


def walks(one: list[Moment], stopped: list[Moment], other: list[Moment] | None = None) -> Walks:
    return Walks(*(Walked(moments, NODES) for moments in (one, one if other is None else other, stopped)))


def counting(runs: int = 5, **fixed: str) -> list[Moment]:
    """Return a training run without an interruption, whose variable ``total`` has the number of the run."""
    return [moment(run, run == 1, total=str(run), **fixed) for run in range(1, runs + 1)]


def named(suspects: list[Suspect]) -> list[str]:
    return [each.name for each in suspects]


# -- causes -----------------------------------------------------------------------------------------------------------


def test_causes_come_in_the_order_in_which_they_are_likely() -> None:
    order = ["items", "rng", "data", "average", "seen", "name", "scale", "count"]
    at_start = ["list", "rng", "iter", "model", "other list", "word", "1.5", "1"]
    later = ["list in another order", "later rng", "later iter", "later model", "list", "other word", "2.5", "2"]
    start: Any = dict(sorted(zip(order, at_start, strict=True)))
    after: Any = dict(sorted(zip(order, later, strict=True)))
    one = [moment(1, True, **start), moment(2, **after), moment(3, **after)]
    stopped = [moment(1, True, **start), moment(2, True, saved="t", **start), moment(3, **start)]
    found = causes(walks(one, stopped), 2)
    assert named(found)[:3] == ["head", "items", "rng"]
    assert named(found)[-3:] == ["name", "scale", "count"]
    assert {*named(found)} == {"head", *order}
    texts = {each.name: str(each) for each in found}
    assert texts["head"] == "head is another one before run 2: code between two runs changes it"
    assert texts["count"] == "count starts over: 1 after the resume, 2 without an interruption"
    assert texts["average"] == "average starts over"


def test_what_is_another_value_than_at_the_start_does_not_start_over() -> None:
    stopped = [moment(1, True, total="1"), moment(3, True, total="9", items="list in another order")]
    one = [moment(run, run == 1, total=str(run), items="list") for run in (1, 2, 3)]
    assert [str(each) for each in causes(walks(one, stopped), 3)] == [
        "items is in another order",
        "total is another one: 9 after the resume, 3 without an interruption",
    ]


def test_only_the_process_that_made_the_run_counts() -> None:
    stopped = [counting()[0], moment(2, True, total="2"), moment(3, True, total="1")]
    assert causes(walks(counting(), stopped), 2) == []
    assert [each.run for each in causes(walks(counting(), stopped), 3)] == [3]
    assert [each.run for each in causes(walks(counting(), stopped), None)] == [3], "whichever differs"
    assert causes(walks(counting(), [counting()[0], moment(9, True, total="1")]), 9) == []


def test_a_time_is_no_cause() -> None:
    other = [each._replace(roots={"total": "77"}) for each in counting()]
    assert causes(walks(counting(), [counting()[0], moment(3, True, total="1")], other), 3) == []


def test_what_started_over_in_an_earlier_process_comes_last() -> None:
    """Such as a sum over an epoch that the next process does not need any more."""
    stopped = [
        *(counting()[0], moment(2, True, total="1", scale="1.5"), moment(3, total="1", scale="1.5")),
        *(moment(4, True, total="4", scale="2.5"), moment(5, total="5", scale="1.5")),
    ]
    assert named(causes(walks(counting(scale="1.5"), stopped), 5)) == ["scale", "total"]


def test_what_a_saved_part_has_in_it_is_not_named_beside_it() -> None:
    one = [moment(run, run == 1, **{'state["head"]': str(run)}) for run in (1, 2)]
    stopped = [one[0], moment(2, True, saved="t", **{'state["head"]': "1"})]
    assert named(causes(walks(one, stopped), 2)) == ["head"]


@pytest.mark.parametrize(
    ("name", "ignored"),
    [("a", True), ("a.b", True), ("a['b']", True), ("a in f()", True), ("ab", False), ("b.a", False)],
)
def test_a_path_is_left_out_with_all_below_it(name: str, ignored: bool) -> None:
    assert is_ignored(name, ["a"]) == ignored
    stopped = [counting()[0], moment(3, True, total="1"), moment(4, total="2")]
    assert causes(walks(counting(), stopped), 3, ["total"]) == []
    assert starting_over(walks(counting(), stopped), ["total"]) == ([], [])


# -- what starts over -------------------------------------------------------------------------------------------------


def test_what_is_still_another_one_before_the_second_run_starts_over() -> None:
    stopped = [counting()[0], moment(3, True, total="1"), moment(4, total="2")]
    over, missing = starting_over(walks(counting(), stopped))
    assert (named(over), missing) == (["total"], [])


@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param([moment(3, True, total="1"), moment(4, total="4")], id="made again in the first run"),
        pytest.param([moment(3, True, total="1"), moment(5, True, total="5")], id="one run only"),
        pytest.param([moment(3, True, targets=["total"], total="1"), moment(4, total="2")], id="set by a for loop"),
        pytest.param([moment(3, True, total="3", new="1"), moment(4, total="4", new="1")], id="only after a resume"),
    ],
)
def test_what_is_harmless_does_not_count(stopped: list[Moment]) -> None:
    assert starting_over(walks(counting(), [counting()[0], *stopped])) == ([], [])


def test_what_is_not_carried_does_not_count() -> None:
    """It is the same before the first run and the last one."""
    one = [moment(run, run == 1, total=str(run % 4)) for run in range(1, 6)]
    stopped = [one[0], moment(3, True, total="1"), moment(4, total="1")]
    assert starting_over(walks(one, stopped)) == ([], [])


def test_what_is_set_again_before_it_is_read_does_not_count() -> None:
    one = [each._replace(dead=["total"]) for each in counting()]
    stopped = [one[0], *(moment(run, run == 3, total="1")._replace(dead=["total"]) for run in (3, 4))]
    assert starting_over(walks(one, stopped)) == ([], [])


@pytest.mark.parametrize(("after", "is_over"), [("None", False), ("7", True)])
def test_what_is_set_once_and_not_yet_after_the_resume_is_missing(after: str, is_over: bool) -> None:
    """Such as what a property computes when it is asked for the first time; but another value is no cache."""
    one = [moment(1, True, mask="None"), *(moment(run, mask="5") for run in (2, 3, 4, 5))]
    stopped = [one[0], moment(3, True, mask=after), moment(4, mask=after)]
    over, missing = starting_over(walks(one, stopped))
    assert (named(over), missing) == ((["mask"], []) if is_over else ([], ["mask"]))


def test_a_dict_that_only_lacks_entries_is_missing_unless_these_are_parts() -> None:
    one = [
        moment(1, True, cache="empty", models="empty"),
        *(moment(r, cache="filled", models="full") for r in (2, 3, 4)),
    ]
    stopped = [one[0], *(moment(run, run == 3, cache="empty", models="empty") for run in (3, 4))]
    over, missing = starting_over(walks(one, stopped))
    assert ([str(each) for each in over], missing) == (["models lacks 1 of its entries after the resume"], ["cache"])


@pytest.mark.parametrize("values", [("mode 1", "mode 0"), ("loader 1", "loader 2")])
def test_a_mode_and_what_a_library_counts_for_itself_are_causes_only(values: tuple[str, str]) -> None:
    one = [moment(run, run == 1, part=values[run > 1]) for run in range(1, 5)]
    stopped = [one[0], moment(3, True, part=values[0]), moment(4, part=values[0])]
    assert starting_over(walks(one, stopped)) == ([], [])
    assert len(causes(walks(one, stopped), 3)) == 1


def test_what_is_missing_counts_if_it_is_a_part() -> None:
    one = [moment(1, True), *(moment(run, average="model", last="1") for run in (2, 3, 4))]
    stopped = [one[0], moment(3, True), moment(4)]
    over, missing = starting_over(walks(one, stopped))
    assert ([str(each) for each in over], missing) == (["average is missing after the resume"], ["last"])


def test_the_first_two_runs_of_each_process_are_judged_and_the_last_one() -> None:
    runs = [(1, True), (2, False), (3, False), (5, True), (6, False), (7, False), (8, True), (9, True), (10, False)]
    assert Walked([moment(run, is_first) for run, is_first in [*runs, (11, False)]]).judged == {
        1,
        2,
        5,
        6,
        8,
        9,
        10,
        11,
    }
    assert Walked().judged == set()


def test_what_is_as_it_should_be_before_the_run_that_differs_is_named_later() -> None:
    """Such as a report that was written anew since the process began."""
    one = [moment(run, run == 1, report=str(run), bad=str(run)) for run in range(1, 7)]
    stopped = [
        *(one[0], moment(4, True, report="1", bad="1"), moment(5, report="1", bad="2")),
        moment(6, saved="t", report="6", bad="3"),
    ]
    assert [str(each) for each in causes(walks(one, stopped), 6)] == [
        "head is another one before run 6: code between two runs changes it",
        "bad starts over: 1 after the resume, 4 without an interruption",
        "report starts over: 1 after the resume, 4 without an interruption",
    ]


# -- the verdict ------------------------------------------------------------------------------------------------------

SAME = Comparison(8, 1, ["item", "outputs"], [], 0, 0, None)
OVER = Suspect("seen", 3, "5", "0", starts_over=True)


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ({}, 0, "resumes exactly: 8 runs: item, outputs"),
        ({"notes": ["a note"]}, 0, "note           a note"),
        ({"unseen": ["a socket"]}, 0, "not seen       the place of a running for loop, a socket"),
        ({"written": ["log.csv"]}, 0, "not moved      files that the script itself writes: log.csv"),
        ({"data_only": True, "comparison": SAME._replace(only_one=0)}, 0, "resumes exactly"),
        ({"forgotten": [OVER]}, 1, "and nothing has used it yet"),
        ({"forgotten": [OVER]}, 1, "the same       8 runs: item, outputs"),
        ({"forgotten": [OVER]}, 1, "--ignore 'seen'"),
        ({"forgotten": [OVER]}, 1, "computes the same bits, but does not keep all that changes, and again when"),
        ({"lost": ["mean 1.5"], "forgotten": [OVER]}, 1, "does NOT resume exactly, and again when repeated"),
        ({"connected": ["10.0.0.7:443"]}, 0, "not held back  what the script itself sends to 10.0.0.7:443"),
        (
            {"lost": ["mean 1.5"], "added": ["mean 2.5"]},
            1,
            "not printed    mean 1.5\nbut            mean 2.5\nlikely cause",
        ),
        (
            {"lost": ["mean 1.5"], "suspects": [OVER]},
            1,
            "look at        seen starts over: 0 after the resume, 5 without",
        ),
        ({"runs_after_end": 2}, 1, "after its end  2 runs were made by a process that was started once more"),
        ({"comparison": SAME._replace(only_other=3)}, 1, "StopAtStepHook(num_steps=)"),
        ({"failed": "KeyError: 'x'", "comparison": None}, 1, "the script fails when it is resumed:\nKeyError: 'x'"),
        ({"lost": ["mean 1.5"], "was_reproduced": False}, 2, "did not come again"),
        ({"is_deterministic": False}, 2, "so nothing can be said of a resume"),
    ],
)
def test_each_kind_of_difference_has_its_status_and_its_words(more: dict[str, Any], status: int, said: str) -> None:
    verdict = Verdict(**{"steps": 8, "comparison": SAME, "resumed_at": [3], **more})
    assert verdict.status == status
    assert said in "\n".join(text_of(verdict))


def test_at_most_four_causes_are_printed() -> None:
    verdict = Verdict(8, SAME, lost=["mean"], suspects=[OVER._replace(name=f"seen{number}") for number in range(6)])
    text = "\n".join(text_of(verdict))
    assert ("seen3" in text, "seen4" in text, "and 2 more" in text) == (True, False, True)


def test_many_members_of_one_container_are_one_cause() -> None:
    names = ["bank[0].next", "bank[1].next", "ema.shadow['a']", "bank[2].next", "ema.shadow['b']", "scale"]
    suspects = [OVER._replace(name=name, starts_over="ema" not in name) for name in names]
    text = "\n".join(text_of(Verdict(8, SAME, lost=["mean"], suspects=suspects)))
    assert "look at        bank: 3 of its members start over, such as [0].next\n" in text
    assert text.count("bank") == 1
    assert text.count("ema.shadow['") == 2
    assert "scale starts over" in text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("epoch 1 took 1.5 s", "epoch 1 took 12.25 s"),
        ("2026-11-28 10:00:00,123 loss 1", "2026-12-01 23:59:59,001 loss 1"),
        ("2026-11-28T10:00:00 loss 1", "2026-11-28T10:00:01 loss 1"),
        ("[00:10<00:20, 3.5it/s]", "[00:11<00:19, 3.6it/s]"),
        ("120 samples/s", "99 samples/s"),
        ("12 ms per step", "13 ms per step"),
        ("memory 1.5 GB", "memory 1.6 GB"),
    ],
)
def test_times_dates_and_rates_do_not_count_in_lines(one: str, other: str) -> None:
    assert masked(one) == masked(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("loss 1.5", "loss 1.6"), ("step 5 saved", "step 6 saved"), ("epoch 3 hits 5", "epoch 3 hits 6"), ("1/2", "2/2")],
)
def test_other_numbers_count(one: str, other: str) -> None:
    assert masked(one) != masked(other)

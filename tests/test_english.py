"""The check of the manual's English finds bad habits, and leaves good sentences alone."""

from __future__ import annotations

import pytest

from docs.english import problems

BAD = """
Of the others, classes and rates are compared as well.
What is faster here, `hvdtrain compare` says.
All ranks but for rank 0 wait.
There is no daemon, no port but that of rank 0.
A script that ends early is said to.
Tensors are moved, and so is whatever has a method `to`.
One that steps later is an error.
Those of the evaluation stay.
It is a loop of one's own.
All else is an error.
Where a compiler is found, C is used.
The page is written anew.
A schedule wants the number of steps.
The rank ends: the cause is printed: a line.
""".strip().splitlines()
GOOD = """
Of course, rank 0 waits, too.
What is faster here?
Where is the cause?
What you print on rank 0 goes to the launcher.
Rank 0 waits, but the other ranks do not.
It has no index but can be iterated.
Two runs, one of which failed, and so the job ends with 1.
The message is "all but one rank is told: what: of the others is said".
One rank of each host reads the file. See `what: all but: one` for a user who wants this.
""".strip().splitlines()


@pytest.mark.parametrize("sentence", BAD)
def test_a_bad_habit_is_found_with_its_line(sentence: str) -> None:
    (found,) = problems(f"# Title\n\nGood text\nin two lines. {sentence} It goes on.\n")
    assert found.startswith("4: ")
    assert found.endswith(sentence.replace("`hvdtrain compare`", "`x`").replace("`to`", "`x`"))


def test_a_long_sentence_is_found_in_an_item_and_a_cell() -> None:
    long = "word " * 51 + "end."
    found = problems(f"- short\n- {long}\n\n| a | b |\n|---|---|\n| {long} | x |")
    assert [text[:3] for text in found] == ["2: ", "6: "]


@pytest.mark.parametrize("sentence", GOOD)
def test_good_english_is_left_alone(sentence: str) -> None:
    assert not problems(f"Text. {sentence} Text.")


def test_code_headings_and_comments_are_left_alone() -> None:
    bad = "\n".join(BAD)
    assert not problems(f"## Of the others\n\n<!-- {bad} -->\n\n```\n{bad}\n```\n\n- text\n")

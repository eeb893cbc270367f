"""What the suite says of itself: the snapshot of sentences, and the tests that were left out."""

from __future__ import annotations

import re

from tests import messages
from tests.conftest import left_out


def test_every_sentence_has_a_test() -> None:
    for key in messages.read():
        file, _, test = messages.test_of(key).partition("::")
        path = messages.SNAPSHOT.parent / file
        assert path.exists(), f"{key}: remove it from {messages.SNAPSHOT.name}"
        assert re.search(rf"^def {test}\(.*", path.read_text(), re.MULTILINE), f"{key}: remove it"


def test_what_was_left_out_is_said_with_how_to_have_it() -> None:
    assert left_out([]) == left_out(["as at two ranks"]) == ""
    java = "('a.py', 3, 'Skipped: without java: apt-get install java')"
    sshd = java.replace("java", "sshd")
    said = left_out([java, "as at two ranks", sshd, java])
    assert said == (
        "left out: 2 without java: apt-get install java; 1 without sshd: apt-get install sshd"
    )

"""The snapshot of sentences has none of a test that is gone."""

from __future__ import annotations

import re

from tests import messages


def test_every_sentence_has_a_test() -> None:
    for key in messages.read():
        file, _, test = messages.test_of(key).partition("::")
        path = messages.SNAPSHOT.parent / file
        assert path.exists(), f"{key}: remove it from {messages.SNAPSHOT.name}"
        assert re.search(rf"^def {test}\(.*", path.read_text(), re.MULTILINE), f"{key}: remove it"

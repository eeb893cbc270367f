"""The sentences of errors, kept once: tests/messages.txt, which a person reads in review.

A test asserts the class of an error, its exit code and its fields, and leaves the wording to the
snapshot:

    def test_an_epoch_count_of_zero(message: Message) -> None:
        with message.raises(InputError):
            TrainConfig(epochs=0).check()

`pytest --update-messages` writes the sentences of the tests that it runs into the snapshot, and
leaves the others. `git diff tests/messages.txt` then shows what users will read.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

E = TypeVar("E", bound=BaseException)

SNAPSHOT = Path(__file__).with_name("messages.txt")
_HEADER = "# Written by `pytest --update-messages`; read by a person in review. See messages.py.\n"
# What differs from run to run: temporary paths, process ids, ports, seconds with a fraction.
_VOLATILE = [
    (re.compile(r"/tmp/[^\s:,;'\")]*"), "<tmp>"),
    (re.compile(r"\b(process|pid|port) \d+"), r"\1 <n>"),
    (re.compile(r"\b\d+\.\d+ s\b"), "<t> s"),
]


class Message:
    """The fixture: compares a sentence with the one that the snapshot has for this test."""

    def __init__(self, test: str, update: bool, hidden: dict[str, str]) -> None:
        self._test = test
        self._update = update
        self._hidden = hidden
        self._count = 0

    def __call__(self, said: BaseException | str, **hidden: object) -> None:
        """Compare the text of an error, or of an output, with the snapshot. The n-th call in a test
        is compared with its n-th sentence. `hidden`: values that differ from run to run, by the
        name to write for them.
        """
        text = str(said).strip()
        for name, value in {**hidden, **self._hidden}.items():
            text = text.replace(str(value), f"<{name}>")
        for pattern, replacement in _VOLATILE:
            text = pattern.sub(replacement, text)
        self._count += 1
        key = self._test if self._count == 1 else f"{self._test} #{self._count}"
        if self._update:
            _write(key, text)
            return
        known = read()
        assert key in known, f"no sentence of {key} in {SNAPSHOT.name}: pytest --update-messages"
        assert text == known[key], f"if this is meant: pytest --update-messages tests/{self._test}"

    @contextlib.contextmanager
    def raises(self, kind: type[E], **hidden: object) -> Iterator[pytest.ExceptionInfo[E]]:
        """Require an error of this class in the block, and compare its text with the snapshot."""
        with pytest.raises(kind) as caught:
            yield caught
        self(caught.value, **hidden)


def read() -> dict[str, str]:
    """Return the sentences of the snapshot by test."""
    known: dict[str, str] = {}
    for block in SNAPSHOT.read_text(encoding="utf-8").split("\n[")[1:]:
        test, _, text = block.partition("]\n")
        known[test] = re.sub(r"^    ", "", text.rstrip("\n"), flags=re.MULTILINE)
    return known


def test_of(key: str) -> str:
    """Return the file and the function of a sentence's test: `training/test_config.py::test_x`."""
    return re.split(r"\[| #", key)[0]


def _write(key: str, text: str) -> None:
    # The workers of pytest-xdist write to one file.
    with SNAPSHOT.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        known = {**read(), key: text}
        blocks = [
            f"\n[{test}]\n" + "".join(f"    {line}\n" for line in said.splitlines())
            for test, said in sorted(known.items())
        ]
        file.truncate(0)
        file.write(_HEADER + "".join(blocks))
        file.flush()


@pytest.fixture
def message(request: pytest.FixtureRequest) -> Message:
    """Return what compares a sentence with the snapshot."""
    # pytest-xdist appends the name of a group.
    test = re.sub(r"@[^\]@]*$", "", request.node.nodeid).removeprefix("tests/")
    hidden = {}
    if "tmp_path" in request.fixturenames:
        hidden["tmp"] = str(request.getfixturevalue("tmp_path"))
    return Message(test, request.config.getoption("--update-messages"), hidden)

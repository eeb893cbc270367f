"""Each seeded fault can be applied: its text is in the package once, and its code compiles."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.fault import Fault
from tests.mutants.run import failed_test
from tests.mutants.table import FAULTS

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.exhaustive


def test_names_are_unique() -> None:
    assert [name for name, num in Counter(fault.name for fault in FAULTS).items() if num > 1] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_applied(fault: Fault) -> None:
    source = (ROOT / "hvdtrain" / fault.file).read_text()
    assert ast.dump(ast.parse(fault.apply(source))) != ast.dump(ast.parse(source))
    for argument in fault.tests.split(" "):
        if argument.startswith("tests/"):
            assert (ROOT / argument.partition("::")[0]).exists(), argument


@pytest.mark.parametrize(
    ("output", "test"),
    [
        (
            "tests/a.py::test_a PASSED  [ 50%]\ntests/a.py::test_b[x-1] \n",
            "tests/a.py::test_b[x-1]",
        ),
        (
            "tests/a.py::test_a[a - b] FAILED [ 9%]\n\n==== FAILURES ====\n",
            "tests/a.py::test_a[a - b]",
        ),
        ("tests/a.py::test_a[2] +++++ Timeout +++++\n", "tests/a.py::test_a[2]"),
        ("no tests ran\n", ""),
    ],
)
def test_the_test_that_failed_is_found(output: str, test: str) -> None:
    assert failed_test(output) == test

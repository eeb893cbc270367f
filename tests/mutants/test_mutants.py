"""Each seeded fault can be applied: its text is in the package once, and its code compiles."""

from __future__ import annotations

import ast

import pytest

from tests.launching import ROOT
from tests.mutants.run import FAULTS


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_applied(name: str) -> None:
    fault = FAULTS[name]
    source = (ROOT / "hvdtrain" / fault.file).read_text()
    assert ast.dump(ast.parse(fault.apply(source))) != ast.dump(ast.parse(source))
    for argument in fault.tests.split(" "):
        if argument.startswith("tests/"):
            assert (ROOT / argument.partition("::")[0]).exists(), argument

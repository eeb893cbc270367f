"""All seeded faults. Each part of the package has a file of them."""

from __future__ import annotations

from tests.mutants import engines, jobs, tools, training
from tests.mutants.fault import Fault

FAULTS: list[Fault] = [*engines.FAULTS, *training.FAULTS, *jobs.FAULTS, *tools.FAULTS]

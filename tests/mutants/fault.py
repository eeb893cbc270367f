"""A seeded fault: one edit of the package, which some test must notice. `run` applies it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One edit of one file of the package, and the tests that must fail with it."""

    name: str
    file: str
    """Its path in hvdtrain/."""
    text: str
    """What is replaced: it occurs once in the file."""
    replacement: str
    tests: str
    """The arguments of pytest that select the tests of what is broken, separated by spaces."""
    wrong: str
    """What goes wrong for a user."""
    accepted: str = ""
    """Why no test notices it, and none is to; empty for a fault that must be killed."""

    def apply(self, source: str) -> str:
        """Return the source of the file with the fault. Raises ValueError unless `text` is there
        exactly once.
        """
        if (found := source.count(self.text)) != 1:
            raise ValueError(f"{self.name}: its text occurs {found} times in hvdtrain/{self.file}")
        return source.replace(self.text, self.replacement)

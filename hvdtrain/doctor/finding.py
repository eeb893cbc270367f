"""The result of one check of `hvdtrain doctor`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "note", "warning", "failure"]

# Without these no rank can train, whatever the backend.
ESSENTIAL = ("torch", "gloo", "open files", "interface variables", "hvdtrain", "versions")


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    "note": absent, and nothing asked for it. "warning": works, but slowly or not always. "failure":
    does not work.
    """

    status: Status
    text: str
    fix: str = ""
    """The command that repairs it; empty if nothing is broken, or if no command can."""
    name: str = ""
    times_ms: Mapping[str, float] = field(default_factory=dict)
    """Of an arm: the duration of each collective."""

    @property
    def works(self) -> bool:
        """Whether what was checked can be used."""
        return self.status in ("ok", "warning")

    @property
    def is_arm(self) -> bool:
        """Whether this is about a backend over a transport, such as "ddp/shm"."""
        return self.name.count("/") == 1 and not self.name.startswith("/")

    def is_about(self, need: str) -> bool:
        """Return whether `need` is its name, without the host, or an arm's backend or transport."""
        name = self.name.partition(" on ")[0]
        return need == name or (self.is_arm and need in name.split("/"))


def is_blocked(findings: Iterable[Finding]) -> bool:
    """Return whether a check failed without which no rank can train."""
    return any(f.status == "failure" and f.name.partition(" on ")[0] in ESSENTIAL for f in findings)


def unmet(findings: Iterable[Finding], needs: Sequence[str]) -> list[str]:
    """Return the names of the required parts that do not work.

    Required are `needs`, and what is essential. Without `needs` an arm must work, if any was
    tried.
    """
    found = list(findings)
    problems = [f.name for f in found if is_blocked([f])]
    for need in needs:
        about = [f for f in found if f.is_about(need)]
        problems += [f.name for f in about if not f.works] or [need] * (not about)
    arms = [f for f in found if f.is_arm]
    if arms and not needs and not any(f.works for f in arms):
        problems.append("training over any transport")
    return list(dict.fromkeys(problems))

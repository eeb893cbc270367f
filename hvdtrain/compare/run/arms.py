"""The arms of a comparison: a name and a command line each.

The command line makes the list of arms here, and `arm_pool` starts them. A name such as ddp/shm
stands for a `NamedEngine` under its own real launcher, which runs `hvdtrain train`; `hvdtrain
doctor` starts the same engines with a script of its own. Imports no torch.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.backends.engines import NamedEngine, parse
from hvdtrain.compare.compare_options import CompareOptions, words_of
from hvdtrain.errors import InputError
from hvdtrain.system import machine

# Without --arms: what existing and new users of DDP and of Horovod would run.
DEFAULT_CPU = ("ddp/gloo", "ddp/shm", "ddp/mpi", "compat/shm", "horovod/mpi", "horovod/gloo")
DEFAULT_CUDA = ("ddp/nccl", "compat/nccl", "horovod/mpi", "horovod/gloo")
# An option with its value, or a word; a script is not the value of the option before it.
_PARTS = re.compile(r"-\S+ (?!-|\S+\.py\b)\S+|\S+")


@dataclass(frozen=True)
class Arm:
    """A command to compare. Its role is arm, baseline, or again: the baseline once more (A/A)."""

    name: str
    line: tuple[str, ...]
    role: str = "arm"

    @property
    def slug(self) -> str:
        """The name as part of a file's name, and of a command: no option."""
        return "".join(c if c.isalnum() else "-" for c in self.name).lstrip("-")

    def command(self, port: int) -> list[str]:
        """Return the command line, with {port} and {arm} replaced."""
        return [w.replace("{port}", str(port)).replace("{arm}", self.slug) for w in self.line]


def choose(options: CompareOptions) -> tuple[list[Arm], list[tuple[str, str]]]:
    """Return the arms, and (name, reason) for each usual one that this machine cannot run.

    A wanted arm is kept even if it cannot run, and fails in the table. Raise InputError for unknown
    or repeated names, or if no arm is left.
    """
    left_out: list[tuple[str, str]] = []
    if options.commands:
        lines = map(words_of, options.commands)
        arms = [Arm(name, line) for name, line in zip(names_of(options), lines, strict=True)]
    else:
        arms, left_out = _of_engines(options)
    names = [arm.name for arm in arms]
    if not arms:
        raise InputError(f"nothing to compare: {'; '.join(f'{n}: {w}' for n, w in left_out)}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{twice[0]} is given twice; give it once: the baseline runs twice anyway")
    base = options.baseline or names[0]
    if base not in names:
        raise InputError(f"--baseline {base} is not among the arms: {', '.join(names)}")
    arms = [replace(arm, role="baseline") if arm.name == base else arm for arm in arms]
    again = replace(arms[names.index(base)], name=f"{base} (repeat)", role="again")
    return [*arms, again], left_out


def _of_engines(options: CompareOptions) -> tuple[list[Arm], list[tuple[str, str]]]:
    hosts = options.all_hosts()
    cuda = machine.usable_gpus() >= options.ranks
    arms, left_out = [], []
    for name in options.arms or (DEFAULT_CUDA if cuda else DEFAULT_CPU):
        engine = parse(name, options.ranks, cuda, hosts)
        why = None if options.arms else engine.unavailable_reason()
        if why is None:
            arms.append(Arm(engine.name, tuple(engine.command(_training(engine, options)))))
        else:
            left_out.append((engine.name, why))
    return arms, left_out


def _training(engine: NamedEngine, options: CompareOptions) -> list[str]:
    """Return the script of an engine's ranks: steps of a task, without end or output."""
    given = {"task": options.task, "batch-size": options.batch_size, "seed": options.seed}
    given |= {"backend": engine.backend, "timeout": options.timeout_s, "epochs": 1_000_000_000}
    if engine.c10d_transport:
        given["transport"] = engine.c10d_transport
    # hvdtrain takes OMP_NUM_THREADS=1 under torchrun for torchrun's own.
    if threads := os.environ.get("OMP_NUM_THREADS"):
        given["threads"] = threads
    line = ["-m", "hvdtrain", "train", "--quiet"]
    line += [word for name, value in given.items() for word in (f"--{name}", str(value))]
    line += [word for setting in options.set for word in ("--set", setting)]
    return line + shlex.split(options.train)


def names_of(options: CompareOptions) -> list[str]:
    """Return the names of the commands: those given, else the words in which each differs from the
    others: variables, program, module and script; the options of commands that these do not tell
    apart; and a number for equal commands.
    """
    if options.names:
        return list(options.names)
    full, options_of = zip(*(_parts(words_of(text)) for text in options.commands), strict=True)
    short = [tuple(part if "=" in part else Path(part).name for part in parts) for parts in full]
    # The names of files alone, unless only their folders differ.
    runs = short if len({*short}) == len({*full}) else full
    found: list[str] = []
    for parts, own in zip(runs, options_of, strict=True):
        alike = [other for other, its in zip(options_of, runs, strict=True) if its == parts]
        words = _differing(parts, runs) + _differing(own, alike)
        name = " ".join(words or short[len(found)])
        found.append(name if name not in found else f"{name} ({len(found) + 1})")
    return found


def _differing(words: Sequence[str], lists: Iterable[Sequence[str]]) -> list[str]:
    """Return the words that are not in all lists."""
    return [word for word in words if not all(word in other for other in lists)]


def _parts(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return what a command runs (variables, program, module, script) and its other words, each
    option with its value.
    """
    parts = _PARTS.findall(" ".join(word for word in words if word != "env"))
    program = next((i for i, part in enumerate(parts) if "=" not in part), 0)
    runs = tuple(
        part
        for i, part in enumerate(parts)
        if i <= program or part.endswith(".py") or part[:3] == "-m "
    )
    return runs, [part for part in parts if part not in runs]

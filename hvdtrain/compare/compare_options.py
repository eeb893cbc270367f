"""The options of a comparison, resolved and validated.

The command line makes them; `arms`, `comparison` and `arm_pool` read them. Imports no torch.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.errors import InputError, did_you_mean
from hvdtrain.launch.host_list import Host, choose_slots, parse_host_list
from hvdtrain.system.commands import own_environment
from hvdtrain.tasks import TASKS

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_VARIABLE = r"[A-Za-z_]\w*="
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def seconds(text: str) -> float:
    """Return the seconds in "90s", "10m", "1.5h" or a plain number. Raise InputError."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        raise InputError(f"{text!r} is not a time; write it as 90s, 10m or 1.5h")
    return float(found[1]) * _SECONDS[found[2]]


def share(text: str) -> float:
    """Return the share in "2%" or "0.02". Raise InputError."""
    try:
        value = float(text.rstrip("% ")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not (0 < value < 1 or (value == 1 and "%" in text)):  # a bare 1 may mean 1 %
        raise InputError(f"{text!r} is not a share between 0 and 1; write it as 2% or 0.02")
    return value


def _arm_names(text: str) -> tuple[str, ...]:
    return tuple(map(str.strip, text.split(","))) if text else ()


def _option(default: Any, text: str, read: Callable[[str], Any] | None = None, **more: Any) -> Any:
    """Return a field, with the arguments of its click option. `read` parses its text, and that of
    the default.
    """
    about = {"default": default, "help": text, "read": read, **more}
    value = read(default) if read is not None and default is not None else default
    return field(default=value, metadata=about)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The resolved options; `check` validates them. Those without a text are TrainConfig's."""

    commands: tuple[str, ...] = ()
    """Command lines to compare: whatever they run, it takes optimizer steps."""
    names: tuple[str, ...] = _option(
        (),
        "Name of a command; one for each, in their order. [default: what differs in them]",
        flags="-n --name",
        multiple=True,
    )
    baseline: str | None = _option(
        None, "The command that the others are compared with. [default: the first]", metavar="NAME"
    )
    arms: tuple[str, ...] = _option(
        "",
        "Instead of commands: engine/transport or horovod/controller, such as ddp/gloo,compat/shm,"
        "horovod/mpi. Each stands for a command that runs `hvdtrain train`. [default: the usual "
        "ones that can run here]",
        _arm_names,
        metavar="A,B,...",
    )
    task: str = "digits"
    set: tuple[str, ...] = ()
    batch_size: int = _option(32, "With --arms: samples in a micro-batch of one rank.")
    ranks: int = _option(
        2, "With --arms: ranks of each arm. [with -H: all slots]", flags="-np --np", metavar="N"
    )
    train: str = _option(
        "",
        "With --arms: more options of `hvdtrain train`, such as '--precision bf16 --clip-norm 1'.",
        metavar="OPTIONS",
    )
    hosts: str = _option(
        "",
        "Hosts that run ranks; --arms start their ranks there over ssh.",
        flags="-H --hosts",
        metavar="HOST:SLOTS,...",
    )
    optimizer: int = _option(
        1,
        "Which of a command's optimizers is stepped and counted, by the order of first steps.",
    )
    allow_different: bool = _option(
        False, "Also time arms that do different work; the report warns of it.", is_flag=True
    )
    prove_only: bool = _option(
        False, "Compare the work of the first steps; time nothing.", is_flag=True
    )
    budget_s: float = _option(
        "3m", "Stop after this time, such as 90s or 10m.", seconds, metavar="TIME"
    )
    target_ci: float = _option(
        "2%",
        "Stop when no interval extends further than this to either side.",
        share,
        metavar="SHARE",
    )
    blocks: int | None = _option(
        None, "Run exactly this many blocks; --budget and --target-ci do not apply.", type=int
    )
    steps: int | None = _option(
        None, "Steps of each arm in a block. [default: about 0.25 s]", type=int
    )
    proof_steps: int = _option(10, "Steps whose work is compared before timing.")
    pin: bool = _option(True, "Bind each rank to its share of the cores.", flags="--pin/--no-pin")
    """Unbound, a rank that wakes up may share a core with another for a while, which tripled the
    noise of a block on two cores.
    """
    seed: int = _option(0, "Seed of the order of the arms; with --arms also of weights and data.")
    max_foreign: float = _option(
        "50%",
        "Drop blocks in which other processes used more of the cores than this; 100% drops none.",
        share,
        metavar="SHARE",
    )
    fail_slower: float | None = _option(
        None,
        "Exit with 6 if an arm is slower than the baseline by more than this and noise.",
        share,
        metavar="SHARE",
    )
    against: str | None = _option(
        None,
        "With --fail-slower: hold each arm against its ratio in this earlier compare.json.",
        metavar="FILE",
    )
    timeout_s: float = _option(300.0, "Seconds that a rank waits for the others.")
    output: str | None = _option(
        None, "Folder of the results. [default: runs/compare-<time>-<task>]", metavar="DIR"
    )

    def check(self) -> None:
        """Raise InputError for invalid values."""
        self._check_commands()
        if self.against is not None and self.fail_slower is None:
            raise InputError("--against needs --fail-slower; give both")
        positive = "budget_s target_ci steps blocks proof_steps batch_size ranks"
        for name in (*positive.split(), "optimizer", "max_foreign", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{flag(name)} {value} must be greater than zero, and finite")
        if ":" not in TASKS.get(self.task, self.task):
            hint = did_you_mean(self.task, TASKS)
            if self.task.endswith(".py"):
                hint = f"compare a script as 'torchrun --nproc-per-node 2 {self.task}'; tasks: "
            raise InputError(
                f"--task {self.task}: {hint}one of: {', '.join(TASKS)}, module:Class, or "
                "file.py:Class"
            )
        _split("--train", self.train)
        self.all_hosts()

    def _check_commands(self) -> None:
        if self.names and len(self.names) != len(self.commands):
            raise InputError(
                f"{len(self.names)} --name for {len(self.commands)} commands; give one for each"
            )
        for text in self.commands:
            own = (w for w in words_of(text) if w != "env" and not re.match(_VARIABLE, w))
            program, *words = [*own] or [""]
            if shutil.which(program, path=own_environment()["PATH"]) is None:
                raise InputError(
                    f"the command {text!r} cannot be started: there is no program {program!r}; "
                    "write each command in quotes: hvdtrain compare 'python a.py' 'python b.py'"
                )
            script = next((word for word in words if re.fullmatch(r"\S+\.py", word)), None)
            if script and "{" not in script and not (self.hosts or Path(script).is_file()):
                raise InputError(f"the command {text!r}: there is no file {script!r} here")

    def all_hosts(self) -> tuple[Host, ...]:
        """Return the hosts of --arms, with as many slots as ranks; none without --hosts.

        Raise InputError if they are too few.
        """
        return tuple(
            choose_slots(parse_host_list(self.hosts), self.ranks, None, None) if self.hosts else ()
        )


def words_of(command: str) -> tuple[str, ...]:
    """Return the words of a command, as a shell takes them: A=1 before a program is a variable.
    Raise InputError.
    """
    words = _split("the command", command) or [""]
    return ("env",) * bool(re.match(_VARIABLE, words[0])) + tuple(words)


def _split(what: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{what} {text!r} cannot be read: {error}") from None


_FLAGS = {"ranks": "np", "budget_s": "budget", "timeout_s": "timeout"}


def flag(name: str) -> str:
    """Return the command-line option of a field."""
    return "--" + _FLAGS.get(name, name).replace("_", "-")

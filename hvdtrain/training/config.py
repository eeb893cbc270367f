"""The options of a run: the fields of TrainConfig.

The command line, the HVDTRAIN_* variables and the TOML file are derived from these fields, so that
an option is written once. Imports no torch: `hvdtrain --help` must be fast.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvdtrain.backends.options import BackendOptions
from hvdtrain.errors import InputError, did_you_mean
from hvdtrain.training.criterion import Criterion, parse_criterion


def _option(text: str, default: Any = None, *others: str, **more: Any) -> Any:
    """Return the field of an option: its help text, its default and the other choices, and of
    `more`:

    `zero=True`: a number may be zero, else it is above. `most`: its upper bound. `metavar`: for the
    help.
    """
    choices = (default, *others) if others else ()
    return field(default=default, metadata={"help": text, "choices": choices, **more})


# Beyond it torch or the system crashes, or raises an error that names no option.
_MOST = 1e30
_UNITS = {"s": 1, "m": 60, "h": 3600}

SECTIONS = {
    "Common options": """task set backend epochs batch_size lr schedule precision run_dir resume""",
    "Where it runs": "transport device threads timeout",
    "Data": """global_batch_size accumulate uneven workers seed max_steps init_from
        init_strict""",
    "Learning rate": "lr_scaling warmup_steps clip_norm",
    "Model and gradients": """compile opt_level sync_bn buffers unused_parameters compression
        bucket_mib shard_optimizer deterministic on_nonfinite""",
    "Evaluation": "eval_every eval_batch_size early_stop keep_best ema no_check",
    "Output": "quiet log_every tensorboard callback",
    "Checkpoints": "checkpoint_every keep grace",
}
"""The options in the order of `--help`."""
_OF_BACKEND = {
    item.name: item.name.removesuffix("_s") for item in dataclasses.fields(BackendOptions)
}
"""The option that gives each field of BackendOptions."""

_FACTOR = r"(?::([0-9]*\.?[0-9]+(?:e-?[0-9]+)?))?"
_NUMBERS = {
    "step": ("([1-9][0-9]*(?:,[1-9][0-9]*)*)", "30,60,80", "EPOCH,EPOCH,...[:FACTOR]", 1e6),
    "plateau": ("(.+?:[0-9]+)", "loss:10", "METRIC[:min|max]:PATIENCE[:FACTOR]", 1.0),
}
"""What may follow a kind of schedule: its pattern, the default, the form in messages, and what the
factor is below.
"""
_SCHEDULES = ("constant", "cosine", "one-cycle", *_NUMBERS)


class ScheduleOption(NamedTuple):
    """What `--schedule` says."""

    kind: str
    epochs: tuple[int, ...] = ()
    """For `step`: those after which the rate drops, sorted."""
    factor: float = 1.0
    """For `step` and `plateau`: by which a drop multiplies the rate."""
    criterion: Criterion | None = None
    """For `plateau`: the metric, and its patience; the rate drops when more evaluations in a row
    than that bring no improvement.
    """


class Interval(NamedTuple):
    """After which steps something is done: one of these, and the others are zero. None: never."""

    steps: int = 0
    epochs: int = 0
    seconds: float = 0.0

    def after_step(self, step: int) -> bool:
        """Return whether it is due after a step."""
        return self.steps > 0 and step % self.steps == 0

    def after_epoch(self, epoch: int) -> bool:
        """Return whether it is due after an epoch, counted from 1."""
        return self.epochs > 0 and epoch % self.epochs == 0


def split_setting(text: str) -> tuple[str, str]:
    """Return name and value of "name=value". Raises InputError for anything else."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InputError(f"--set {text!r} is not name=value")
    return name, value


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The resolved options of a run, equal on every rank; `check` validates them."""

    # What is trained
    task: str = _option("A built-in task, module:Class, or file.py:Class.", "digits")
    set: tuple[str, ...] = _option(
        "A constructor argument of the task, as name=value. Repeat for several.",
        (),
        metavar="NAME=VALUE",
    )

    # Where and how
    backend: str = _option(
        "single, dp, ddp, horovod, compat, module:Class, or auto: by the launcher.", "auto"
    )
    transport: str = _option("Transport of ddp and compat: auto, shm, mpi, gloo, nccl.", "auto")
    device: str = _option("auto is CUDA if every rank has a GPU.", "auto", "cpu", "cuda")
    threads: int | None = _option(
        "CPU threads of each rank. [default: OMP_NUM_THREADS, else this host's cores / ranks]",
        most=4096,
    )
    precision: str = _option(
        "bf16 and fp16 are autocast; fp16 scales the loss.", "fp32", "bf16", "fp16", "fp64"
    )
    opt_level: str = _option(
        "Apex's levels of mixed precision, with --precision fp16 or bf16 as the half type: O0 fp32 "
        "only; O1 autocast; O2 half weights, fp32 BatchNorm and master weights; O3 half only.",
        "none",
        "O0",
        "O1",
        "O2",
        "O3",
    )
    deterministic: bool = _option("Refuse operations that torch cannot repeat bit by bit.", False)
    timeout: float = _option("Seconds that a rank waits for the others.", 300.0, most=1e9)
    bucket_mib: float = _option("Size of DDP's gradient buckets, MiB.", 25.0, most=1e9)
    buffers: str = _option(
        "BatchNorm statistics after each step: rank 0's, the mean, or every rank's own.",
        "broadcast",
        "average",
        "local",
    )
    unused_parameters: str = _option(
        "A parameter without a gradient: raise an error, or use zeros.", "error", "zero"
    )
    compile: bool = _option(
        "Compile the model, in the wrapper of the backend, with torch.compile.", False
    )
    sync_bn: bool = _option("BatchNorm layers normalize over the batches of all ranks.", False)
    compression: str = _option(
        "How gradients are sent: as they are, in half precision, or as low-rank factors.",
        "none",
        "fp16",
        "bf16",
        "powersgd",
    )
    shard_optimizer: bool = _option(
        "The ranks of a host share the memory of the parameters and of the optimizer's state, "
        "and each steps its part of them.",
        False,
    )
    # How long
    epochs: int | None = _option(
        "Passes over the training data. [default: 10, or as many as --max-steps needs]"
    )
    max_steps: int | None = _option(
        "Optimizer steps of the run. With --epochs, it ends at whichever comes first."
    )
    init_from: str | None = _option(
        "Start from these weights: a model.pt or model.safetensors, a checkpoint, or a run "
        "directory. A checkpoint that --resume finds replaces them."
    )
    init_strict: bool = _option(
        "Require that --init-from has exactly the weights of the model. Otherwise weights that are "
        "missing on either side, or differ in shape, are left out, such as a new head.",
        True,
    )

    # Batches
    batch_size: int | None = _option(
        "Samples of one rank's micro-batch. [default: 32, unless --global-batch-size]"
    )
    global_batch_size: int | None = _option(
        "Samples of one optimizer step: micro-batch x accumulation x ranks."
    )
    accumulate: int = _option("Micro-batches per optimizer step.", 1)
    uneven: str = _option(
        "The samples left over at an epoch's end: drop them, pad with repeats, join them in a "
        "short batch weighted by samples, or end with an error.",
        "drop",
        "pad",
        "join",
        "error",
    )
    workers: int = _option("Loader processes of each rank.", 0, zero=True, most=4096)
    seed: int = _option(
        "Seeds the initial weights, the order of the data, and dropout (by rank).", 0, zero=True
    )

    # Learning rate
    lr: float | None = _option("Learning rate, in place of the task's own.")
    lr_scaling: str = _option(
        "Multiply the learning rate by ranks x accumulation (linear), or its square root (sqrt).",
        "none",
        "linear",
        "sqrt",
    )
    schedule: str = _option(
        "The learning rate after the warm-up: constant, cosine, one-cycle, "
        "step:EPOCH,EPOCH,...[:FACTOR] or plateau:METRIC[:min|max]:PATIENCE[:FACTOR]; a task's own "
        "schedule replaces it.",
        "constant",
        metavar="KIND",
    )
    warmup_steps: int = _option(
        "Steps of linear warm-up: step k of n uses k / (n + 1) of the rate.", 0, zero=True
    )
    clip_norm: float = _option("Largest norm of the averaged gradient.", math.inf, most=math.inf)

    # Evaluation, output and checkpoints
    no_check: bool = _option(
        "Skip the evaluation of one batch before the first step, which finds wrong metrics early.",
        False,
    )
    eval_batch_size: int | None = _option(
        "Samples of one rank's micro-batch of an evaluation. [default: as in training]",
        most=1 << 40,
    )
    eval_every: int | str = _option(
        "Steps between evaluations, or epochs, such as 2e; the run also ends with one. 0: only at "
        "the end. never: none.",
        "1e",
        zero=True,
    )
    early_stop: str | None = _option(
        "METRIC[:min|max]:PATIENCE[:DELTA]: stop after PATIENCE evaluations without an improvement "
        "of more than DELTA."
    )
    keep_best: str | None = _option(
        "METRIC[:min|max]: also keep the checkpoint of the best evaluation."
    )
    ema: float | None = _option(
        "Evaluate an exponential moving average of the weights with this decay, such as 0.999."
    )
    callback: tuple[str, ...] = _option(
        "A Callback: module:Class, file.py:Class, or an object there. Repeat for several.",
        (),
        metavar="FILE.py:CLASS",
    )
    on_nonfinite: str = _option(
        "If a loss or gradient is not finite: stop the run at the next line of metrics, or skip "
        "the step on all ranks, which checks the gradient in every step.",
        "stop",
        "skip",
    )
    tensorboard: bool = _option(
        "Also write the metrics as TensorBoard scalars, into the run directory.", False
    )
    log_every: int = _option("Steps between lines of metrics.", 10)
    quiet: bool = _option(
        "Only take steps: no output, run directory, evaluation or checkpoint.", False
    )
    run_dir: str | None = _option("[default: runs/<time>-<task>-<backend>]")
    checkpoint_every: int | str = _option(
        "Steps between checkpoints, or epochs, such as 2e, or a time, such as 15m, checked every "
        "--log-every steps. 0: at the end of every epoch. never: none, not even at the end.",
        "0",
        zero=True,
    )
    keep: int = _option("Checkpoints to keep.", 2)
    grace: int | str = _option(
        "Time to save, such as 90s or 5m, after any rank receives SIGTERM, Ctrl-C, SIGUSR1 or "
        "SIGUSR2: all ranks save after the same step and end. After this time they end unsaved.",
        "30s",
    )
    resume: str = _option(
        "auto: the newest valid checkpoint of --run-dir, if any. must: the same, but an error if "
        "there is none. Or the path of a checkpoint or of a run directory.",
        "none",
    )

    def with_options(self, options: Mapping[str, Any]) -> TrainConfig:
        """Return a copy with other values, by name. Raises InputError for a name that is none."""
        for name in options:
            if name not in vars(self):
                raise InputError(
                    f"there is no option {name!r}; {did_you_mean(name, vars(self))}the fields of "
                    "TrainConfig are the options of a Trainer"
                )
        return dataclasses.replace(self, **options)

    def check(self) -> None:
        """Raise InputError for an invalid value, or an invalid combination of values."""
        for item in dataclasses.fields(self):
            self._check_value(item, getattr(self, item.name))
        for text in self.set:
            split_setting(text)
        wanted = ["fp32"] if self.opt_level == "O0" else ["fp16", "bf16"]
        if self.opt_level != "none" and self.precision not in wanted:
            raise InputError(
                f"--opt-level {self.opt_level} needs --precision {' or '.join(wanted)}, not "
                f"{self.precision}"
            )
        if self.batch_size is not None and self.global_batch_size is not None:
            raise InputError("--batch-size and --global-batch-size exclude each other; give one")
        if self.resume in ("auto", "must") and self.run_dir is None:
            raise InputError(
                f"--resume {self.resume} looks for a checkpoint in --run-dir; give --run-dir, too"
            )
        if not (self.init_strict or self.init_from):
            raise InputError(
                "--no-init-strict has no effect without --init-from; give --init-from, too, or "
                "leave --no-init-strict out"
            )
        if self.ema is not None and self.ema >= 1:
            raise InputError(
                f"--ema {self.ema} must be less than 1, such as 0.999; with 1 the average would "
                "never move"
            )
        self.checkpoint_interval()
        self.evaluation_interval()
        self.grace_s()
        if self.schedule_option().kind == "one-cycle" and self.warmup_steps:
            raise InputError(
                f"--schedule one-cycle begins with a warm-up of its own; leave --warmup-steps "
                f"{self.warmup_steps} out"
            )
        self.early_stop_criterion()
        self.keep_best_criterion()

    def _check_value(self, item: dataclasses.Field[Any], value: Any) -> None:
        """Raise InputError for a value that is empty, no choice, or out of bounds."""
        name, about = flag(item.name), item.metadata
        if value in (None, "") and value != item.default:
            raise InputError(f"{name} {value!r} is not a value; leave the option out")
        if about["choices"] and value not in about["choices"]:
            raise InputError(f"{name} {value!r} is not one of: {', '.join(about['choices'])}")
        if isinstance(value, (int, float)) and value is not False:
            most = about.get("most", _MOST)
            if not (value > 0 or (value == 0 and about.get("zero"))):  # NaN is refused, too
                bound = "not be negative" if about.get("zero") else "be greater than zero"
                raise InputError(f"{name} {value} must {bound}")
            if value > most:
                # Neither format() nor str() takes every int.
                shown = value if value == math.inf else min(value, 10**300)
                raise InputError(f"{name} {shown:g} must be at most {most:g}")

    def max_epochs(self) -> int:
        """Return `epochs`, or its default; without a limit if `max_steps` alone is given."""
        return self.epochs or (10 if self.max_steps is None else sys.maxsize)

    def checkpoint_interval(self) -> Interval:
        """Return when checkpoints are due that no signal and no callback asks for.

        Raises InputError if `checkpoint_every` is no number of steps or epochs, and no time.
        """
        or_time = ", nor a time, such as 15m"
        return _interval("--checkpoint-every", self.checkpoint_every, of_zero=1, or_time=or_time)

    def evaluation_interval(self) -> Interval:
        """Return when evaluations are due. Raises InputError if `eval_every` is neither a number of
        steps nor of epochs.
        """
        return _interval("--eval-every", self.eval_every)

    def grace_s(self) -> float:
        """Return `grace` in seconds. Raises InputError if it is no time."""
        if seconds := _seconds(str(self.grace).strip()):
            return seconds
        raise InputError(f"--grace {self.grace!r} is not a time, such as 30s or 5m")

    def schedule_option(self) -> ScheduleOption:
        """Return the kind of schedule, with its numbers. Raises InputError if it cannot be read."""
        text = self.schedule
        kind, colon, numbers = map(str.strip, text.partition(":"))
        if kind not in _NUMBERS:
            if colon or kind not in _SCHEDULES:
                raise InputError(f"--schedule {text!r} is not one of: {', '.join(_SCHEDULES)}")
            return ScheduleOption(kind)
        if kind == "step":
            numbers = numbers.replace(" ", "")  # the metric of a plateau may have some
        pattern, default, form, below = _NUMBERS[kind]
        found = re.fullmatch(pattern + _FACTOR, numbers if colon else default)
        if not (found and 0 < (factor := float(found[2] or 0.1)) < below):
            raise InputError(
                f"--schedule {text!r} is not {kind}:{form}, such as {kind}:{default}:0.1, with a "
                f"factor above 0 and below {below:g}"
            )
        if kind == "plateau":
            watched = parse_criterion(found[1], "--schedule plateau:")
            return ScheduleOption(kind, factor=factor, criterion=watched)
        return ScheduleOption(kind, tuple(sorted(map(int, found[1].split(",")))), factor)

    def early_stop_criterion(self) -> Criterion | None:
        """Return what `early_stop` says, if anything. Raises InputError if it cannot be read."""
        return parse_criterion(self.early_stop, "--early-stop")

    def keep_best_criterion(self) -> Criterion | None:
        """Return what `keep_best` says, if anything. Raises InputError if it cannot be read."""
        return parse_criterion(self.keep_best, "--keep-best")

    def micro_batch(self, num_ranks: int) -> int:
        """Return the number of samples in one rank's micro-batch.

        Raises InputError if the global batch size is not divisible by ranks x accumulation.
        """
        if self.global_batch_size is None:
            return self.batch_size or 32
        parts = num_ranks * self.accumulate
        each, rest = divmod(self.global_batch_size, parts)
        if rest:
            raise InputError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of {num_ranks} "
                f"ranks x {self.accumulate} accumulated micro-batches = {parts}"
            )
        return each

    def backend_options(self) -> BackendOptions:
        """Return the options that `open_backend` takes."""
        return BackendOptions(**{name: getattr(self, own) for name, own in _OF_BACKEND.items()})

    def opened_with(self, options: BackendOptions) -> TrainConfig:
        """Return these options, with those that the backend was opened with. Raises InputError for
        one that is given here, with another value.
        """
        changes = {}
        for item, name in _OF_BACKEND.items():
            ours, theirs = getattr(self, name), getattr(options, item)
            if ours not in (theirs, getattr(TrainConfig, name)):
                raise InputError(
                    f"TrainConfig has {name}={ours!r}, but the backend was opened with {theirs!r}; "
                    "open it with open_backend(options=config.backend_options())",
                    on_all_ranks=True,
                )
            if ours != theirs:
                changes[name] = theirs
        return dataclasses.replace(self, **changes)

    def agreed(self) -> dict[str, object]:
        """Return the options that the handshake compares between ranks, by flag."""
        options = {flag(name): value for name, value in vars(self).items()}
        del options["--run-dir"]  # rank 0's counts
        # Rank 0 alone reads the checkpoint, but all ranks take part in its broadcast: compare only
        # whether they resume.
        return {**options, "--resume": self.resume != "none"}


def flag(name: str) -> str:
    """Return the command-line flag of a field: `batch_size` gives `--batch-size`."""
    return "--" + name.replace("_", "-")


def _interval(option: str, given: int | str, of_zero: int = 0, or_time: str = "") -> Interval:
    """Return what an option says. `of_zero`: the epochs that 0 stands for. `or_time`: for the
    message, where it may be a time.
    """
    text = str(given).strip()
    if text == "never":
        return Interval()
    if found := re.fullmatch(r"([0-9]{1,31})(e?)", text):
        number = int(found[1])
        if not found[2]:
            return Interval(number, 0 if number else of_zero)
        if number:
            return Interval(epochs=number)
    elif or_time and text[-1:] in _UNITS and (seconds := _seconds(text)):
        return Interval(seconds=seconds)
    raise InputError(
        f"{option} {text!r} is neither a number of steps, such as 500, nor of epochs, "
        f"such as 2e{or_time}"
    )


def _seconds(text: str) -> float:
    """Return the seconds of a time such as `30s`, `5m` or `2h`; a number alone is in seconds, too.
    0.0 if it is no time above zero.
    """
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh]?)", text)
    return float(found[1]) * _UNITS.get(found[2], 1) if found else 0.0

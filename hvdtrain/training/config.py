"""The options of a run: the fields of TrainConfig.

The command line, the HVDTRAIN_* variables and the TOML file are derived from these fields, so that
an option is written once. Imports no torch: `hvdtrain --help` must be fast.
"""

from __future__ import annotations

import dataclasses
import math
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.backends.options import BackendOptions
from hvdtrain.errors import InputError, did_you_mean
from hvdtrain.training.criterion import Criterion, parse_criterion
from hvdtrain.training.schedule_option import ScheduleOption, parse_schedule


def _option(default: Any, text: str, *choices: str, **more: Any) -> Any:
    """Return the field of an option: its default, help text and choices, and of `more`:

    `above`, `least`, `most`: bounds of a number. `needs`: the flag of the option without which it
    has no effect. `metavar`: for the help. `fingerprint=False`: ranks may have other values.
    """
    return field(default=default, metadata={"help": text, "choices": choices, **more})


# Beyond it torch or the system crashes, or raises an error that names no option.
_MOST = 10**30
_UNITS = {"s": 1, "m": 60, "h": 3600}

SECTIONS = {
    "Common options": """task set backend epochs batch_size lr schedule precision run_dir resume""",
    "Where it runs": "transport device threads timeout debug",
    "Data": """global_batch_size accumulate uneven workers seed max_steps init_from
        init_strict""",
    "Learning rate": "lr_scaling warmup_steps clip_norm",
    "Model and gradients": """compile opt_level sync_bn buffers unused_parameters compression
        bucket_mib shard_optimizer deterministic on_nonfinite""",
    "Evaluation": "eval_every eval_batch_size early_stop keep_best ema no_check",
    "Output": "quiet log_every tensorboard callback",
    "Checkpoints": """checkpoint_every keep checkpoint_async checkpoint_signals grace""",
}
"""The options in the order of `--help`."""
_OF_BACKEND = {
    item.name: item.name.removesuffix("_s") for item in dataclasses.fields(BackendOptions)
}
"""The option that gives each field of BackendOptions."""
_SIGNALS = ("TERM", "USR1", "USR2", "HUP", "INT", "QUIT", "XCPU")


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
    task: str = _option("digits", "A built-in task, module:Class, or file.py:Class.")
    set: tuple[str, ...] = _option(
        (),
        "A constructor argument of the task, as name=value. Repeat for several.",
        metavar="NAME=VALUE",
    )

    # Where and how
    backend: str = _option(
        "auto",
        "single, dp, ddp, horovod, compat, module:Class, or auto: by the launcher.",
    )
    transport: str = _option("auto", "Transport of ddp and compat: auto, shm, mpi, gloo, nccl.")
    device: str = _option("auto", "auto is CUDA if every rank has a GPU.", "auto", "cpu", "cuda")
    threads: int | None = _option(
        None,
        "CPU threads of each rank. [default: OMP_NUM_THREADS, else this host's cores / ranks]",
        above=0,
        most=4096,
    )
    precision: str = _option(
        "fp32", "bf16 and fp16 are autocast; fp16 scales the loss.", "fp32", "bf16", "fp16", "fp64"
    )
    opt_level: str = _option(
        "none",
        "Apex's levels of mixed precision, with --precision fp16 or bf16 as the half type: O0 fp32 "
        "only; O1 autocast; O2 half weights, fp32 BatchNorm and master weights; O3 half only.",
        "none",
        "O0",
        "O1",
        "O2",
        "O3",
    )
    deterministic: bool = _option(False, "Refuse operations that torch cannot repeat bit by bit.")
    timeout: float = _option(300.0, "Seconds that a rank waits for the others.", above=0, most=1e9)
    bucket_mib: float = _option(25.0, "Size of DDP's gradient buckets, MiB.", above=0, most=1e9)
    buffers: str = _option(
        "broadcast",
        "BatchNorm statistics after each step: rank 0's, the mean, or every rank's own.",
        "broadcast",
        "average",
        "local",
    )
    unused_parameters: str = _option(
        "error",
        "A parameter that gets no gradient: an error, or a gradient of zeros.",
        "error",
        "zero",
    )
    compile: bool = _option(
        False, "Train the net, as the backend has wrapped it, through torch.compile."
    )
    sync_bn: bool = _option(False, "BatchNorm layers normalize over the batches of all ranks.")
    compression: str = _option(
        "none",
        "How gradients are sent: as they are, in half precision, or as low-rank factors.",
        "none",
        "fp16",
        "bf16",
        "powersgd",
    )
    shard_optimizer: bool = _option(
        False,
        "The ranks of a host share the memory of the parameters and of the optimizer's state, "
        "and each steps its part of them.",
    )
    # How long
    epochs: int | None = _option(
        None, "Passes over the training data. [default: 10, or what --max-steps takes]", above=0
    )
    max_steps: int | None = _option(
        None,
        "Optimizer steps of the run; with --epochs, too, it ends at the first of both.",
        above=0,
    )
    init_from: str | None = _option(
        None,
        "Start from these weights: a model.pt or model.safetensors, a checkpoint, or a run "
        "directory. A checkpoint that --resume finds replaces them.",
    )
    init_strict: bool = _option(
        True,
        "The weights of --init-from are those of the whole model. Without it, names that either "
        "lacks, or has in another shape, are left out, as those of a new head.",
        needs="--init-from",
    )

    # Batches
    batch_size: int | None = _option(
        None,
        "Samples of one rank's micro-batch. [default: 32, unless --global-batch-size]",
        above=0,
    )
    global_batch_size: int | None = _option(
        None, "Samples of one optimizer step: micro-batch x accumulation x ranks.", above=0
    )
    accumulate: int = _option(1, "Micro-batches per optimizer step.", above=0)
    uneven: str = _option(
        "drop",
        "The samples left over at an epoch's end: drop them, pad with repeats, join them in a "
        "short batch weighted by samples, or refuse them.",
        "drop",
        "pad",
        "join",
        "error",
    )
    workers: int = _option(0, "Loader processes of each rank.", least=0, most=4096)
    seed: int = _option(
        0, "Seeds the initial weights, the order of the data, and dropout (by rank).", least=0
    )

    # Learning rate
    lr: float | None = _option(
        None, "Learning rate, in place of the task's own.", above=0, most=1e30
    )
    lr_scaling: str = _option(
        "none",
        "Multiply the learning rate by ranks x accumulation (linear), or its square root (sqrt).",
        "none",
        "linear",
        "sqrt",
    )
    schedule: str = _option(
        "constant",
        "The learning rate after the warm-up: constant, cosine, one-cycle, "
        "step:EPOCH,EPOCH,...[:FACTOR] or plateau:METRIC[:min|max]:PATIENCE[:FACTOR]; a task's own "
        "schedule replaces it.",
        metavar="KIND",
    )
    warmup_steps: int = _option(
        0, "Steps of linear warm-up: step k of n is taken with k / (n + 1) of the rate.", least=0
    )
    clip_norm: float = _option(
        math.inf, "Largest norm of the averaged gradient.", above=0, most=math.inf
    )

    # Evaluation, output and checkpoints
    no_check: bool = _option(
        False,
        "Do not evaluate one batch before the first step, which finds mistakes in the metrics.",
    )
    eval_batch_size: int | None = _option(
        None,
        "Samples of one rank's micro-batch of an evaluation. [default: as in training]",
        above=0,
        most=1 << 40,
    )
    eval_every: int | str = _option(
        "1e",
        "Steps between evaluations, or epochs, such as 2e; the last step has one, too. 0: that one "
        "only. never: none.",
    )
    early_stop: str | None = _option(
        None,
        "METRIC[:min|max]:PATIENCE[:DELTA]: end after PATIENCE evaluations without an improvement, "
        "by more than DELTA.",
    )
    keep_best: str | None = _option(
        None, "METRIC[:min|max]: keep the checkpoint of the best evaluation, beside the newest."
    )
    ema: float | None = _option(
        None,
        "Evaluate an exponential moving average of the weights with this decay, such as 0.999.",
        above=0,
    )
    callback: tuple[str, ...] = _option(
        (),
        "A Callback: module:Class, file.py:Class, or an object there. Repeat for several.",
        metavar="FILE.py:CLASS",
    )
    on_nonfinite: str = _option(
        "stop",
        "A gradient or loss that is not finite: end the run, found at the next line of metrics; or "
        "skip the step on all ranks, which looks at the gradient of each step.",
        "stop",
        "skip",
    )
    tensorboard: bool = _option(
        False, "Also write the metrics as TensorBoard scalars, into the run directory."
    )
    log_every: int = _option(10, "Steps between lines of metrics.", above=0)
    quiet: bool = _option(
        False, "Take steps alone: no output, run directory, evaluation or checkpoint."
    )
    run_dir: str | None = _option(
        None, "[default: runs/<time>-<task>-<backend>]", fingerprint=False
    )
    checkpoint_every: int | str = _option(
        0,
        "Steps between checkpoints, or epochs, such as 2e, or a time, such as 15m, looked at every "
        "--log-every steps. 0: at the end of every epoch. never: not even of the last step.",
    )
    keep: int = _option(2, "Checkpoints to keep.", above=0)
    checkpoint_async: bool = _option(
        False,
        "Copy the state of a checkpoint in memory, and write it while the next steps are taken.",
    )
    checkpoint_signals: str = _option(
        "TERM,INT,USR1,USR2",
        "After one of these signals to any rank, all ranks save after the same step, and end. INT "
        "is Ctrl-C. Or none.",
    )
    grace: int | str = _option(
        "30s",
        "After such a signal: the time to save, such as 90s or 5m; then the run ends without a new "
        "checkpoint.",
        needs="--checkpoint-signals",
    )
    resume: str = _option(
        "none",
        "auto: the newest valid checkpoint of --run-dir, if any. must: the same, or an error. Or "
        "the path of one, or of a run directory.",
        fingerprint=False,
    )

    debug: bool = _option(False, "Show every frame of an error, not those of your own code alone.")

    def with_options(self, options: Mapping[str, Any]) -> TrainConfig:
        """Return a copy with other values, by name. Raises InputError for a name that is none."""
        known = [item.name for item in dataclasses.fields(self)]
        for name in options:
            if name not in known:
                raise InputError(
                    f"there is no option {name!r}; {did_you_mean(name, known)}the fields of "
                    "TrainConfig are the options of a Trainer"
                )
        return dataclasses.replace(self, **options)

    def check(self) -> None:
        """Raise InputError for an invalid value, or an invalid combination of values."""
        for item in dataclasses.fields(self):
            if getattr(self, item.name) is None and item.default is not None:
                raise InputError(f"{flag(item.name)} None is no value; leave it out")
        for text in self.set:
            split_setting(text)
        for item in dataclasses.fields(self):
            self._check_value(item, getattr(self, item.name))
        self._check_opt_level()
        if self.batch_size is not None and self.global_batch_size is not None:
            raise InputError("--batch-size and --global-batch-size exclude each other; give one")
        for name in ("run_dir", "init_from"):
            if getattr(self, name) == "":
                raise InputError(f"{flag(name)} is empty; give a path, or leave it out")
        if self.resume in ("auto", "must") and self.run_dir is None:
            raise InputError(
                f"--resume {self.resume} looks for a checkpoint in --run-dir; give that, too"
            )
        if self.ema is not None and self.ema >= 1:
            raise InputError(
                f"--ema {self.ema} must be less than 1, such as 0.999; with 1 the average would "
                "never move"
            )
        self.checkpoint_interval()
        self.evaluation_interval()
        self.grace_s()
        self.signal_numbers()
        if self.schedule_option().kind == "one-cycle" and self.warmup_steps:
            raise InputError(
                f"--schedule one-cycle begins with a warm-up of its own; leave --warmup-steps "
                f"{self.warmup_steps} out"
            )
        self.early_stop_criterion()
        self.keep_best_criterion()

    def _check_value(self, item: dataclasses.Field[Any], value: Any) -> None:
        """Raise InputError for a value out of bounds, or one that has no effect."""
        name, about = flag(item.name), item.metadata
        if about["choices"] and value not in about["choices"]:
            raise InputError(f"{name} {value!r} is not one of: {', '.join(about['choices'])}")
        if isinstance(value, (int, float)):
            most = about.get("most", _MOST)
            if "above" in about and not value > 0:  # not `value <= 0`: NaN is refused, too
                raise InputError(f"{name} {value} must be greater than zero")
            if value < about.get("least", value):
                raise InputError(f"{name} {value} must not be negative")
            if value == math.inf > most:
                raise InputError(f"{name} {value} must be finite")
            if value > most:
                # Neither format() nor str() takes every int.
                shown = f"{value:g}" if value < 1e300 else "over 1e300"
                raise InputError(f"{name} {shown} must be at most {most:g}")
        needed = about.get("needs")
        is_given = self.signal_numbers() if item.name == "grace" else self.init_from
        if needed and value != item.default and not is_given:
            given = flag(f"no_{item.name}") if value is False else f"{name} {value}"
            raise InputError(
                f"{given} has no effect without {needed}; give that, too, or leave it out"
            )

    def max_epochs(self) -> int:
        """Return `epochs`, or its default; without a limit if `max_steps` alone is given."""
        if self.epochs is not None:
            return self.epochs
        return 10 if self.max_steps is None else sys.maxsize

    def checkpoint_interval(self) -> tuple[int, int]:
        """Return the steps and the epochs between checkpoints; 0 means never.

        Raises InputError if `checkpoint_every` is no number of steps or epochs, and no time.
        """
        if self.checkpoint_seconds() is not None:
            return 0, 0
        steps, epochs = self._interval("checkpoint_every")
        return steps, epochs or int(not steps and self.has_checkpoints)

    @property
    def has_checkpoints(self) -> bool:
        """Whether a run has checkpoints that no signal and no callback asks for."""
        return self.checkpoint_every != "never"

    def checkpoint_seconds(self) -> float | None:
        """Return the time between checkpoints, if `checkpoint_every` is one."""
        text = str(self.checkpoint_every).strip()
        return _seconds(text) if text[-1:] in _UNITS else None

    def evaluation_interval(self) -> tuple[int, int]:
        """Return the steps and the epochs between evaluations; 0 means never.

        Raises InputError if `eval_every` is neither a number of steps nor of epochs.
        """
        return self._interval("eval_every")

    def _interval(self, name: str) -> tuple[int, int]:
        """Return the steps and the epochs that an option is; one of them, or both, are 0."""
        given = getattr(self, name)
        if given == "never":
            return 0, 0
        found = re.fullmatch(r"(-?[0-9]{1,31})(e?)", str(given).strip())
        if found is None or (found[2] and int(found[1]) < 1):
            raise InputError(
                f"{flag(name)} {given!r} is neither a number of steps, such as 500, nor of epochs, "
                f"such as 2e{', nor a time, such as 15m' * (name == 'checkpoint_every')}"
            )
        number = int(found[1])
        if number < 0:
            raise InputError(f"{flag(name)} {number} must not be negative")
        return (0, number) if found[2] else (number, 0)

    def signal_numbers(self) -> tuple[signal.Signals, ...]:
        """Return `checkpoint_signals`. Raises InputError for a signal that cannot be one."""
        names = [part.strip().upper() for part in self.checkpoint_signals.split(",")]
        if names == ["NONE"]:
            return ()
        known = {name: signal.Signals[f"SIG{name}"] for name in _SIGNALS}
        try:
            return tuple(known[name.removeprefix("SIG")] for name in names)
        except KeyError as error:
            raise InputError(
                f"--checkpoint-signals has {error}; it is a list of {', '.join(known)}, or none"
            ) from None

    def grace_s(self) -> float:
        """Return `grace` in seconds. Raises InputError if it is no time."""
        found = _seconds(str(self.grace).strip())
        if found is None:
            raise InputError(f"--grace {self.grace!r} is not a time, such as 30s or 5m")
        return found

    def schedule_option(self) -> ScheduleOption:
        """Return what `schedule` says. Raises InputError if it cannot be read."""
        return parse_schedule(self.schedule)

    def early_stop_criterion(self) -> Criterion | None:
        """Return what `early_stop` says, if anything. Raises InputError if it cannot be read."""
        text = self.early_stop
        return None if text is None else parse_criterion(text, "--early-stop", True, True)

    def keep_best_criterion(self) -> Criterion | None:
        """Return what `keep_best` says, if anything. Raises InputError if it cannot be read."""
        text = self.keep_best
        return None if text is None else parse_criterion(text, "--keep-best")

    def _check_opt_level(self) -> None:
        level, precision = self.opt_level, self.precision
        if level == "O0" and precision != "fp32":
            raise InputError(
                f"--opt-level O0 is fp32 only, which --precision {precision} is not; leave one out"
            )
        if level in ("O1", "O2", "O3") and precision not in ("bf16", "fp16"):
            raise InputError(
                f"--opt-level {level} needs a half type, which --precision {precision} is not; "
                "give --precision fp16 or bf16"
            )

    def micro_batch(self, num_ranks: int) -> int:
        """Return the number of samples in one rank's micro-batch.

        Raises InputError if the global batch size is not divisible by ranks x accumulation.
        """
        if self.global_batch_size is None:
            return 32 if self.batch_size is None else self.batch_size
        parts = num_ranks * self.accumulate
        if self.global_batch_size % parts:
            raise InputError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of {num_ranks} "
                f"ranks x {self.accumulate} accumulated micro-batches = {parts}"
            )
        return self.global_batch_size // parts

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
            if ours == theirs:
                continue
            if ours != getattr(TrainConfig, name):
                raise InputError(
                    f"TrainConfig has {name}={ours!r}, but the backend was opened with {theirs!r}; "
                    "open it with open_backend(options=config.backend_options())",
                    on_all_ranks=True,
                )
            changes[name] = theirs
        return dataclasses.replace(self, **changes)

    def agreed(self) -> dict[str, object]:
        """Return the options that the handshake compares between ranks, by flag."""
        options = {
            flag(item.name): getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.metadata.get("fingerprint", True)
        }
        # Rank 0 alone reads the checkpoint, but all ranks take part in its broadcast: compare only
        # whether they resume.
        return {**options, "--resume": self.resume != "none"}


def flag(name: str) -> str:
    """Return the command-line flag of a field: `batch_size` gives `--batch-size`."""
    return "--" + name.replace("_", "-")


def _seconds(text: str) -> float | None:
    """Return the seconds of a time such as `30s`, `5m` or `2h`; a number alone is in seconds, too.
    None if it is no time above zero.
    """
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh]?)", text)
    if found is None or not float(found[1]):
        return None
    return float(found[1]) * _UNITS.get(found[2], 1)

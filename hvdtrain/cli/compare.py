"""`hvdtrain compare`: which backend is fastest here, and do they train the same thing?"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hvdtrain.cli.train_options import train_option
from hvdtrain.compare.compare_options import CompareOptions, flag
from hvdtrain.compare.record import Record, read
from hvdtrain.errors import HvdtrainError, InputError, TooSlow
from hvdtrain.job.world import detect
from hvdtrain.launch.host_list import parse_host_list
from hvdtrain.system import files
from hvdtrain.system.signals import uninterrupted

if TYPE_CHECKING:
    from hvdtrain.compare.analysis.gate import GateRow
    from hvdtrain.compare.report.terminal import ProgressTable


def _read(function: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a click callback that parses text with `function`; its errors name the option."""

    def read(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return function(value) if isinstance(value, str) else value
        except InputError as error:
            raise InputError(f"{max(param.opts, key=len)} {error}") from None

    return read


def _option(item: dataclasses.Field[Any]) -> click.Option:
    """Return the click option of a field of CompareOptions."""
    if not item.metadata:
        return train_option(item.name)
    more = dict(item.metadata)
    flags, read, choices = (more.pop(name, None) for name in ("flags", "read", "choices"))
    if read is not None:
        more["callback"] = _read(read)
    if choices is not None:
        more["type"] = click.Choice(choices)
    names = (flags or flag(item.name)).split()
    return click.Option([*names, item.name], show_default=more["default"] not in (None, ""), **more)


@click.command(
    "compare",
    params=[
        click.Argument(["commands"], nargs=-1, metavar="[COMMAND]..."),
        *(_option(item) for item in dataclasses.fields(CompareOptions) if item.name != "commands"),
    ],
    epilog="Ends with 0 compared, 1 nothing could be compared or an arm did other work, "
    "2 bad input, 6 slower than --fail-slower allows, 130 Ctrl-C, 143 SIGTERM.",
)
def command(**values: Any) -> None:
    """Compare backends side by side: do they train the same thing, and how fast?

    \b
    hvdtrain compare
    hvdtrain compare 'torchrun --nproc-per-node 2 ddp.py' 'horovodrun -np 2 python hvd.py'
    hvdtrain compare --task my.py:MyTask -np 8 --arms ddp,horovod,compat --budget 10m
    hvdtrain compare --np 1,2,4 --scaling strong
    hvdtrain compare -H a:4,b:4 --arms ddp/gloo,ddp/mpi
    """
    if detect().size > 1:
        raise InputError("hvdtrain compare starts the launchers itself; run it without one")
    options = CompareOptions(**values)
    context = click.get_current_context()
    if options.commands:
        _check_only_of_commands(context)
    if options.hosts and context.get_parameter_source("ranks") is ParameterSource.DEFAULT:
        slots = sum(host.slots for host in parse_host_list(options.hosts))
        options = dataclasses.replace(options, ranks=(slots,))
    options.check()
    run(options)


_OF_COMMANDS = (
    "commands names hosts optimizer allow_different baseline budget_s target_ci blocks steps "
    "proof_steps threads pin seed max_foreign fail_slower against timeout_s output".split()
)


def _check_only_of_commands(context: click.Context) -> None:
    """Raise InputError for options of hvdtrain's own training, which scripts do not obey."""
    given = [
        flag(name)
        for name in context.params
        if name not in _OF_COMMANDS
        and context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if given:
        raise InputError(
            f"{', '.join(given)}: a command has its own; write them into the commands, or give "
            "--arms in place of commands"
        )


def run(options: CompareOptions) -> None:
    """Compare, and write the report.

    Raises HvdtrainError where nothing could be compared, or an arm did other work.
    """
    try:
        from hvdtrain.compare.analysis.gate import gate_rows
        from hvdtrain.compare.analysis.summary import summarise
        from hvdtrain.compare.report import html_report, terminal
        from hvdtrain.compare.run.arms import choose_all_arms, choose_commands, choose_device
        from hvdtrain.compare.run.comparison import Comparison
        from hvdtrain.system import machine
    except ModuleNotFoundError as error:
        raise InputError(
            f"hvdtrain compare needs {error.name}; pip install jinja2 matplotlib scipy"
        ) from None
    before = None if options.against is None else read(Path(options.against))
    left_out: list[tuple[str, str]] = []
    if options.commands:
        arms, device, why = choose_commands(options), None, None
    else:
        device, why = choose_device(options.device, machine.usable_gpus(), max(options.ranks))
        options = dataclasses.replace(options, device=device)
        arms, left_out = choose_all_arms(options)
    folder = _make_folder(options)
    display = terminal.ProgressTable()
    comparison = Comparison(options, arms, display, folder)
    record = comparison.record
    record.config.device_reason = why
    try:
        with display:
            if device is not None:
                display.print_line(f"device   {device} ({why})")
            for name, why in left_out:
                display.print_line(f"not compared: {name}: {why}")
            comparison.run()
    finally:
        if record.blocks or record.parity:
            with uninterrupted():
                page = html_report.write(record, folder)
                terminal.show(summarise(record))
                display.print_line(f"report   {page}")
    if error_text := _error_text(record):
        raise HvdtrainError(f"{error_text} (see {folder})")
    if options.fail_slower is not None:
        _judge(gate_rows(record, options.fail_slower, before), display)


def _judge(rows: list[GateRow], display: ProgressTable) -> None:
    """Print the rows of the gate. Raise TooSlow for an arm that is slower, HvdtrainError for one
    that cannot be judged, InputError without any: such a gate would always be open.
    """
    for row in rows:
        display.print_line(f"gate     {row.text}")
    if not rows:
        raise InputError("--fail-slower: no arm was timed here that --against has, too")
    if unknown := [row.arm for row in rows if row.is_slower is None]:
        raise HvdtrainError(f"--fail-slower cannot judge: {', '.join(unknown)}")
    if slower := [row.arm for row in rows if row.is_slower]:
        raise TooSlow(f"slower than --fail-slower allows: {', '.join(slower)}")


def _error_text(record: Record) -> str:
    """Return why the comparison ends with an error, or ""."""
    timed = {key for block in record.kept_blocks for key in block.arms}
    # Succeed only if some arm was timed to the end, in kept blocks.
    compared = ("arm", "again", "by hand")
    if not any(
        key in timed and arm.status == "measured" and arm.role in compared
        for key, arm in record.arms.items()
    ):
        first: dict[str, str] = {}  # arm by reason: a broken task gives every arm the same reason
        for key, arm in record.arms.items():
            if arm.reason:
                first.setdefault(arm.reason, key)
        reasons = [f"{key}: {reason}" for reason, key in first.items()]
        advice = (
            "all blocks were dropped, because other processes used the CPU; end them, or give "
            "--max-foreign 100%"
        )
        return f"nothing could be compared; {'; '.join(reasons[:3]) or advice}"
    refused = ", ".join(key for key, arm in record.arms.items() if arm.status == "refused")
    return f"not the same training as the baseline: {refused}" if refused else ""


def _make_folder(options: CompareOptions) -> Path:
    """Make the folder that was asked for, or one named after the time and the task."""
    about = "commands" if options.commands else options.task.rpartition(":")[2]
    name = "".join(c if c.isalnum() else "-" for c in about).lower()
    usual = Path(f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    folder = Path(options.output or usual)
    try:
        if not options.output:
            usual.parent.mkdir(exist_ok=True)
            return files.make_folder(usual)
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            with contextlib.suppress(FileExistsError):
                (folder / "logs").mkdir()  # of two comparisons that start together, one succeeds
                return folder
    except OSError as error:
        raise InputError(f"--output {folder} cannot be used: {error.strerror}") from None
    raise InputError(f"--output {folder} is not empty; give another folder")

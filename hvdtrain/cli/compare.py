"""`hvdtrain compare`: which backend is fastest here, and do they train the same thing?"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.cli.command_options import option, origins, train_option
from hvdtrain.compare.compare_options import CompareOptions, flag
from hvdtrain.errors import HvdtrainError, InputError, TooSlow
from hvdtrain.job.world import detect
from hvdtrain.launch.host_list import parse_host_list
from hvdtrain.system import files
from hvdtrain.system.signals import uninterrupted

if TYPE_CHECKING:
    from hvdtrain.compare.record import Record


def _parse(
    read: Callable[[str], Any], ctx: click.Context, param: click.Parameter, value: Any
) -> Any:
    """Parse the text of an option with `read`, whose errors get its name: a click callback."""
    try:
        return read(value) if isinstance(value, str) else value
    except InputError as error:
        raise InputError(f"{max(param.opts, key=len)} {error}") from None


def _option(item: dataclasses.Field[Any]) -> click.Option:
    """Return the click option of a field of CompareOptions."""
    if not item.metadata:
        return train_option(item.name)
    more = {**item.metadata}
    names, text = more.pop("flags", flag(item.name)), more.pop("help")
    if read := more.pop("read"):
        more["callback"] = partial(_parse, read)
    more["show_default"] = more["default"] not in (None, "")
    return option(f"{names} {item.name}", text, **more)


@click.command(
    "compare",
    params=[
        click.Argument(["commands"], nargs=-1, metavar="[COMMAND]..."),
        *(_option(item) for item in dataclasses.fields(CompareOptions) if item.name != "commands"),
    ],
    epilog="Exit codes: 0 compared, 1 an arm failed or did different work or nothing was compared, "
    "2 bad input, 6 slower than --fail-slower allows, 130 Ctrl-C, 143 SIGTERM.",
)
def command(**values: Any) -> None:
    """Compare training commands side by side: do they train the same, and which is the fastest?

    \b
    hvdtrain compare 'torchrun --nproc-per-node 2 ddp.py' 'horovodrun -np 2 python hvd.py'
    hvdtrain compare
    hvdtrain compare --task my.py:MyTask -np 8 --arms ddp,horovod,compat --budget 10m
    hvdtrain compare -H a:4,b:4 --arms ddp/gloo,ddp/mpi

    All commands run at the same time, and the first twice: write {port} for a free port, and {arm}
    for the name of the command. The folder of the results has report.html, summary.md for a pull
    request, summary.csv, all logs and compare.json.
    """
    if detect().size > 1:
        raise InputError("hvdtrain compare starts the launchers itself; start it without one")
    by_name = origins()
    # Options of named arms, which do not apply to commands.
    given = [
        flag(name) for name in "arms task set batch_size ranks train".split() if name in by_name
    ]
    if values["commands"] and given:
        raise InputError(
            f"{', '.join(given)}: for --arms only; write them into the commands, or give --arms "
            "instead of commands"
        )
    if values["hosts"] and "ranks" not in by_name:
        values["ranks"] = sum(host.slots for host in parse_host_list(values["hosts"]))
    options = CompareOptions(**values)
    options.check()
    run(options)


def run(options: CompareOptions) -> None:
    """Compare, and write the report.

    Raises HvdtrainError where nothing could be compared, or an arm did other work; for
    --fail-slower TooSlow for an arm that is slower, HvdtrainError for one that cannot be judged.
    """
    try:
        from hvdtrain.compare.analysis.gate import gate_rows
        from hvdtrain.compare.analysis.table import make_table
        from hvdtrain.compare.record import read
        from hvdtrain.compare.report import html_report, terminal
        from hvdtrain.compare.run.arms import choose
        from hvdtrain.compare.run.comparison import Comparison
    except ModuleNotFoundError as error:
        raise InputError(
            f"hvdtrain compare needs {error.name}; pip install 'hvdtrain[compare]'"
        ) from None
    before = None if options.against is None else make_table(read(Path(options.against)))
    arms, left_out = choose(options)
    folder = _make_folder(options)
    display = terminal.ProgressTable()
    comparison = Comparison(options, arms, display.update, folder)
    record = comparison.record
    try:
        with display:
            for name, why in left_out:
                display.print_line(f"not compared: {name}: {why}")
            comparison.run()
    finally:
        table = make_table(record)
        if record.blocks or record.parity:
            with uninterrupted():
                page = html_report.write(table, folder)
                terminal.show(table)
                display.print_line(f"report   {page}")
    if error_text := _error_text(record, table.caution):
        raise HvdtrainError(f"{error_text} (see {folder})")
    if options.fail_slower is not None:
        rows = gate_rows(table, options.fail_slower, before)
        for row in rows:
            display.print_line(f"gate     {row.text}")
        if not rows:  # such a gate would always be open
            raise InputError("--fail-slower: --against has none of these arms; compare the same")
        if unknown := [row.arm for row in rows if row.is_slower is None]:
            raise HvdtrainError(f"--fail-slower has no verdict on: {', '.join(unknown)}")
        if slower := [row.arm for row in rows if row.is_slower]:
            raise TooSlow(f"slower than --fail-slower allows: {', '.join(slower)}")


def _error_text(record: Record, caution: str) -> str:
    """Return why the comparison ends with an error, or ""."""
    ended = {name: arm for name, arm in record.arms.items() if arm.has_ended_early}
    refused = [name for name, arm in ended.items() if arm.status == "refused"]
    if refused and record.arm_of("baseline") not in ended:
        return f"did not train the same as the baseline: {', '.join(refused)}"
    if any(arm.role == "arm" and not arm.has_ended_early for arm in record.arms.values()):
        if ended:
            return f"failed: {', '.join(ended)}"
        if record.kept_blocks or record.config["prove_only"]:
            return ""
    first: dict[str | None, str] = {}  # arm by reason: a broken task gives all arms the same reason
    for name, arm in ended.items():
        first.setdefault(arm.reason, name)
    reasons = [f"{name}: {reason}" for reason, name in first.items()]
    why = "; ".join(reasons[:3]) or caution or "there is only the baseline"
    return f"nothing could be compared; {why}"


def _make_folder(options: CompareOptions) -> Path:
    """Make the folder that was asked for, or one named after the time and the task."""
    about = "commands" if options.commands else options.task.rpartition(":")[2]
    name = re.sub(r"[\W_]", "-", about).lower()
    folder = Path(options.output or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    try:
        if not options.output:
            folder.parent.mkdir(exist_ok=True)
            return files.make_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            with contextlib.suppress(FileExistsError):
                (folder / "logs").mkdir()  # of two comparisons that start together, one succeeds
                return folder
    except OSError as error:
        raise InputError(f"--output {folder} cannot be used: {error.strerror}") from None
    raise InputError(f"--output {folder} is not empty; give another folder")

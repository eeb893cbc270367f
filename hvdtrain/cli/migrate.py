"""`hvdtrain migrate`: rewrite a Horovod script for hvdtrain.hvd, or for native DDP."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from hvdtrain.cli.command_options import PATH
from hvdtrain.errors import HvdtrainError, InputError, printable

_TORCHRUN = "torchrun --nproc-per-node 2".split()


@click.command("migrate")
@click.argument("script", type=PATH)
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENT...]")
@click.option(
    "--to", "target", type=click.Choice(["hvd", "ddp"]), default="hvd", show_default=True,
    help="hvdtrain.hvd: one line changes; ddp: torch.distributed and DDP under torchrun.",
)  # fmt: skip
@click.option("-o", "--output", type=PATH, help="Write the new script to this file.")
@click.option("--prove", is_flag=True, help="Compare both on 2 ranks with `hvdtrain compare`.")
def command(
    script: Path, arguments: tuple[str, ...], target: str, output: Path | None, prove: bool
) -> None:
    """Print what changes in SCRIPT, which imports horovod.torch, as a diff.

    With --output, print the commands that run the new script and compare it with SCRIPT. ARGUMENT
    is one of SCRIPT's own, for these commands and --prove. What cannot be converted stays as it is
    and is listed, with what to do by hand.

    \b
    hvdtrain migrate train.py                               the one line to hvdtrain.hvd
    hvdtrain migrate train.py --to ddp -o train_ddp.py      a DDP script for torchrun
    hvdtrain migrate train.py --to ddp --prove -- --epochs 3

    \b
    exit code 0   everything is converted (and with --prove, trains the same)
              1   some lines must be converted by hand, or --prove has not shown equal training
              2   SCRIPT is not Python or does not use Horovod, or a file cannot be read or written
    """
    try:
        from hvdtrain.migrate.rewrite import to_ddp
        from hvdtrain.migrate.to_hvd import to_hvd
    except ModuleNotFoundError as error:
        raise InputError(f"hvdtrain migrate needs {error.name}; pip install libcst") from None
    try:
        text = script.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{script} cannot be read: {error}") from None
    name = str(script)
    made = (to_ddp if target == "ddp" else to_hvd)(text, name)
    if output is None:
        lines = text.splitlines(keepends=True), made.text.splitlines(keepends=True)
        click.echo(printable("".join(difflib.unified_diff(*lines, name, name))), nl=False)
    else:
        try:
            output.write_text(made.text)
        except OSError as error:
            raise InputError(f"--output {output} cannot be written: {error.strerror}") from None
    for kind, places in {"note": made.notes, "by hand": made.not_converted}.items():
        for line, about in places:
            click.echo(printable(f"{script}:{line}: {kind}: {about}"), err=True)
    if output is not None:
        before, after = _commands(script, output, arguments)
        click.echo(f"now run: {after}")
        click.echo(f"then compare: {shlex.join(['hvdtrain', 'compare', before, after])}")
    if prove:
        _prove(script, made.text, arguments)
    if made.not_converted:
        raise HvdtrainError(f"{script}: to convert by hand, see above: {len(made.not_converted)}")


def _commands(script: Path, new: Path, arguments: tuple[str, ...]) -> list[str]:
    """Return the lines that run the script, without Horovod, and the converted one on two ranks."""
    programs = ["-m", "hvdtrain.hvd", str(script)], [str(new)]
    return [shlex.join([*_TORCHRUN, *program, *arguments]) for program in programs]


def _prove(script: Path, text: str, arguments: tuple[str, ...]) -> None:
    """Compare the script, as it runs without Horovod, with the converted one, and print the result.

    If the script takes fewer than ten steps, compare those that there are. If they are not equal,
    print the output of compare and raise HvdtrainError.
    """
    from hvdtrain.compare.proof.diagnosis import ROUNDING

    click.echo("comparing both on 2 ranks", err=True)
    steps = "10"
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / script.name
        new.write_text(text)
        commands = _commands(script, new, arguments)
        # The converted script finds the modules beside the script, too.
        paths = str(script.absolute().parent), os.environ.get("PYTHONPATH", "")
        while steps:
            output = Path(folder) / f"compare-{steps}"
            compare = f"-m hvdtrain compare --prove-only --proof-steps {steps} -n before -n after"
            done = subprocess.run(
                [sys.executable, *compare.split(), "--output", str(output), *commands],
                errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )  # fmt: skip
            try:
                record = json.loads((output / "compare.json").read_text())
            except OSError:
                break
            for row in record["parity"]:
                # On two ranks compare refuses what differs by rounding alone, as engines need not.
                # A converted script may: it averages in each backward pass, which its note says.
                is_equal = row["verdict"] == "bitwise"
                is_close = row["verdict"] == "within tolerance" or row["cause"] == ROUNDING
                if row["arm"] == "after" and (is_equal or is_close):
                    limits = "" if is_equal else ", except for rounding"
                    click.echo(f"proved{limits}: {row['text']}")
                    return
            reason = record["arms"]["before"]["reason"] or ""
            ended = re.match(r"the script ended after (\d+) steps", reason)
            steps = ended[1] if ended and ended[1] != steps else ""
    click.echo(done.stdout, err=True)
    raise HvdtrainError(
        f"--prove: equal training is not shown; hvdtrain compare exited with {done.returncode}"
    )

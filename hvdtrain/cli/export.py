"""`hvdtrain export`: write the weights of a run as one file."""

from __future__ import annotations

from pathlib import Path

import click

from hvdtrain.cli.command_options import PATH
from hvdtrain.errors import printable


@click.command("export")
@click.argument("path", metavar="RUN", type=PATH)
@click.argument("output", metavar="FILE", type=PATH)
@click.option("--best", is_flag=True, help="The checkpoint that --keep-best kept.")
@click.option("--ema", is_flag=True, help="The average of the weights, of a run with --ema.")
def command(path: Path, output: Path, best: bool, ema: bool) -> None:
    """Write the weights of a run to FILE: model.pt (torch.save) or model.safetensors.

    RUN is a run directory (its newest checkpoint), a checkpoint, or another file of weights. FILE
    holds the model's state_dict(), without the prefixes of DDP or torch.compile; of a run with half
    weights at --opt-level O2, the fp32 masters.

    \b
    hvdtrain export runs/20260101-120000-digits-ddp model.pt
    model.load_state_dict(torch.load("model.pt"))

    \b
    exit code 0   written
              2   the weights are missing or damaged, or FILE cannot be written
    """
    from hvdtrain.training import weights
    from hvdtrain.training.metrics import fingerprint

    weights.check_suffix(output, weights.SUFFIXES)
    found = weights.find(path, best, ema)
    state = weights.read(found)
    if found.path.is_file():  # a checkpoint has the model's own names
        state = weights.without_prefixes(state)
    weights.write(state, output)
    click.echo(printable(f"weights  {found.path}"))
    click.echo(
        f"done     {output}  {len(state)} tensors, {output.stat().st_size / 1e6:.3g} MB  "
        f"params_sha256 {fingerprint(state)[:12]}"
    )

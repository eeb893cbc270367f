"""`hvdtrain install-horovod`: build Horovod against the installed torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.command_options import count, option


@click.command(
    "install-horovod",
    params=[
        option(
            "--with-mpi/--without-mpi",
            "Build with MPI, or with Gloo only.  [default: MPI if mpicxx is on PATH]",
            default=None,
        ),
        option(
            "--with-nccl/--without-nccl",
            "Build with NCCL, or for the CPU only.  [default: NCCL if torch and CUDA allow it]",
            default=None,
        ),
        count(
            "-j --jobs",
            "Compilers to run at once.  [default: one per core, 2.5 GiB of memory each]",
        ),
        option("--force", "Build even if the installed Horovod works.", is_flag=True),
        option("--check", "Only check the installed Horovod.", is_flag=True),
        option("--dry-run", "Print the decisions and commands; build nothing.", is_flag=True),
        option(
            "--log",
            "Write the full log here.  [default: a temporary file, kept after a failure]",
            type=click.Path(dir_okay=False, path_type=Path),
        ),
    ],
)
def command(
    with_mpi: bool | None, with_nccl: bool | None, jobs: int | None, **options: Any
) -> None:
    """Build Horovod against the torch that is installed here, and check it.

    Horovod has no wheels, and its source does not build unchanged against today's torch. This
    command finds the compilers and libraries of the machine and builds in a temporary folder. It
    replaces the installed Horovod only after the build has succeeded, and ends with an allreduce of
    two real ranks under each launcher. Run it again after each change of torch; it builds only if
    that is necessary.

    \b
    exit code 0   Horovod is installed and works
              1   the build or the check failed
              2   something is missing on this machine, or an option is wrong
    """
    from hvdtrain.horovod_build.build_plan import Choices
    from hvdtrain.horovod_build.install import Options, install_horovod

    install_horovod(Options(Choices(with_mpi, with_nccl, jobs), **options), click.echo)

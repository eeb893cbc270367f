"""The command line. One file per command; `train` is what runs when no command is named."""

from __future__ import annotations

import sys
from importlib import import_module

import click

import hvdtrain
from hvdtrain import failure
from hvdtrain.errors import InputError, LaunchError, did_you_mean
from hvdtrain.launcher_watch import end_with_launcher
from hvdtrain.tasks import TASKS
from hvdtrain.world import detect, guess_world

COMMANDS = {
    "train": "hvdtrain.cli.train",
    "compare": "hvdtrain.cli.compare",
    "install-horovod": "hvdtrain.cli.install_horovod",
    "report": "hvdtrain.cli.report",
}


class Commands(click.Group):
    """The table above, loaded one by one; options without a command belong to `train`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name every command, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command and return its `command`."""
        if cmd_name not in COMMANDS:
            hint = did_you_mean(cmd_name, COMMANDS).rstrip() or f"one of: {', '.join(COMMANDS)}"
            if _is_task(cmd_name):
                hint = f"to train that task: hvdtrain --task {cmd_name}"
            raise InputError(f"no command {cmd_name!r}; {hint}")
        command: click.Command = import_module(COMMANDS[cmd_name]).command
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `train` in front of a line that starts with an option, or that is empty."""
        own = {"--help", "-h", "--version"}
        if not args or (args[0].startswith("-") and args[0] not in own):
            args = ["train", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # `--batch_size` is `--batch-size`, as torchrun has it; torch.distributed.launch also
        # passes `--local-rank` or `--local_rank` by version.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
    epilog="`hvdtrain [OPTIONS]` without a command is `hvdtrain train [OPTIONS]`.",
)
@click.version_option(hvdtrain.__version__, prog_name="hvdtrain")
def cli() -> None:
    """Train one task under any launcher, on native DDP or on Horovod.

    \b
    hvdtrain                                                  one process
    torchrun --nproc-per-node 2 -m hvdtrain --backend ddp     native DDP
    horovodrun -np 2 hvdtrain                                 real Horovod
    mpirun -np 2 hvdtrain --backend horovod                   real Horovod over MPI
    """


def main() -> None:
    """Run the command line: the console script and `python -m hvdtrain`.

    Ends with the exit codes of `hvdtrain.errors`, and ends the whole job where one rank fails.
    """
    try:
        world = detect()
    except LaunchError as error:
        failure.end_job(guess_world(), error)
    end_with_launcher(world)
    with failure.guard(world):
        try:
            # Not cli.main: it takes an EOFError of the task for Ctrl-C, and is silent about a
            # BrokenPipeError.
            with cli.make_context("hvdtrain", sys.argv[1:]) as context:
                cli.invoke(context)
        except click.exceptions.Exit as done:
            sys.exit(done.exit_code)
        except click.ClickException as error:
            raise _as_input_error(error) from None


def _as_input_error(error: click.ClickException) -> InputError:
    """What click says of a wrong line, in one line, for the rank that speaks for its host."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else "hvdtrain"
    said = error.format_message()
    if isinstance(error, click.NoSuchOption) and path == "hvdtrain train":
        name = error.option_name
        if name in ("-n", "-N", "-H") or name.startswith(_OF_LAUNCHERS):
            return InputError(
                f"{name} is a launcher's option, and hvdtrain is none; start ranks with: torchrun "
                "--nproc-per-node 2 -m hvdtrain, mpirun -np 2 hvdtrain, or horovodrun -np 2 "
                "hvdtrain"
            )
    extra = [word for word in sys.argv[2:] if _is_task(word) and f"({word})" in said]
    if extra:
        said += f"; a task is given with: --task {extra[0]}"
    return InputError(f"{said} (see: {path} --help)")


# What launchers call the number of ranks, and their hosts; `-np` reaches click as `-n`.
_OF_LAUNCHERS = ("--np", "--num-proc", "--nnodes", "--host", "--world-size")


def _is_task(word: str) -> bool:
    """Whether a word that is no command names a task, as `--task` does."""
    return word in TASKS or ".py" in word or (":" in word and not word.startswith("-"))

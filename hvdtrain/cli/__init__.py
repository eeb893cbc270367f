"""The command line: one file per command. Without the name of a command, `train` runs."""

from __future__ import annotations

import os
import select
import signal
import sys
from importlib import import_module

import click
from click.shell_completion import CompletionItem, shell_complete

import hvdtrain
from hvdtrain.cli.command_options import check_known
from hvdtrain.errors import InputError, LaunchError
from hvdtrain.job.launcher_watch import end_with_launcher
from hvdtrain.job.world import detect, guess_world
from hvdtrain.liveness import failure
from hvdtrain.tasks import TASKS

SECTIONS = {
    "Train": "train init",
    "Compare": "compare report migrate",
    "Launch": "launch doctor install-horovod",
    "After a run": "runs evaluate export",
}
COMMANDS = " ".join(SECTIONS.values()).split()
_HELP_CHARACTERS = 150  # of the first sentence about a command
_COMPLETE = "_HVDTRAIN_COMPLETE"


def _load(name: str) -> click.Command:
    """Import the module of a command, and return its `command`."""
    command: click.Command = import_module(f"hvdtrain.cli.{name.replace('-', '_')}").command
    return command


class Commands(click.Group):
    """The commands of the sections above, each imported on use. Options alone belong to `train`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the sections."""
        return COMMANDS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command and return its `command`; InputError if there is none."""
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:
                return None  # while the shell completes a line
            if _is_task(cmd_name):
                raise InputError(
                    f"no command {cmd_name!r}; to train that task: hvdtrain --task {cmd_name}"
                )
        check_known(cmd_name, COMMANDS, f"no command {cmd_name!r}")
        return _load(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in their sections, each with its first sentence."""
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name, _load(name).get_short_help_str(_HELP_CHARACTERS))
                        for name in names.split()
                    ]
                )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `train` before arguments that start with an option, or if there are none."""
        # While the shell completes the first word, there is none yet.
        first = next(iter(args), "" if ctx.resilient_parsing else "-")
        if first.startswith("-") and first not in ("--help", "-h", "--version"):
            args = ["train", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return what may follow as the first word: commands, and the options of `train`."""
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            train = _load("train")
            found += train.shell_complete(click.Context(train, ctx, "train"), incomplete)
        return found


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # Accept `--batch_size` for `--batch-size`, as torchrun does. torch.distributed.launch
        # passes `--local-rank` or `--local_rank`, depending on its version.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
    epilog="`hvdtrain [OPTIONS]` without a command is `hvdtrain train [OPTIONS]`.",
)
@click.version_option(hvdtrain.__version__, prog_name="hvdtrain")
def cli() -> None:
    """Train one task under any launcher, with native DDP or Horovod.

    \b
    hvdtrain                                                  one process
    torchrun --nproc-per-node 2 -m hvdtrain --backend ddp     native DDP
    horovodrun -np 2 hvdtrain                                 real Horovod
    mpirun -np 2 hvdtrain --backend horovod                   real Horovod over MPI
    """


def hvdrun() -> None:
    """Run `hvdtrain launch`: the console script `hvdrun`."""
    sys.argv[1:1] = ["launch"]
    main()


def main() -> None:
    """Run the command line: the console script and `python -m hvdtrain`.

    Ends with the exit codes of `hvdtrain.errors`, and ends the whole job if one rank fails.
    """
    if instruction := os.environ.get(_COMPLETE):
        sys.exit(shell_complete(cli, {}, "hvdtrain", _COMPLETE, instruction))
    try:
        world = detect()
    except LaunchError:  # which the commands that need a World raise again; `doctor` reports it
        world = guess_world()
    end_with_launcher(world)
    with failure.guard(world):
        try:
            # Not cli.main: it reports an EOFError of the task as Ctrl-C, and hides a
            # BrokenPipeError.
            with cli.make_context("hvdtrain", sys.argv[1:]) as context:
                cli.invoke(context)
                if sys.stdout is not None:  # `hvdtrain ... >&-`
                    sys.stdout.flush()
        except click.exceptions.Exit as done:
            sys.exit(done.exit_code)
        except BrokenPipeError:
            if world.size > 1 or not _reader_has_ended():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout at exit
            sys.exit(128 + signal.SIGPIPE)
        except click.ClickException as error:
            raise _as_input_error(error) from None


def _reader_has_ended() -> bool:
    """Return whether stdout is a pipe that nobody reads any more: `hvdtrain runs | head`."""
    poller = select.poll()
    poller.register(1, 0)
    return any(event & select.POLLERR for _, event in poller.poll(0))


def _as_input_error(error: click.ClickException) -> InputError:
    """Return click's error about the command line as an InputError of one line."""
    context: click.Context | None = getattr(error, "ctx", None)  # of a UsageError
    path = context.command_path if context else "hvdtrain"
    message = error.format_message()
    name = error.option_name if isinstance(error, click.NoSuchOption) else ""
    if path == "hvdtrain train" and name.startswith(_LAUNCHER_OPTIONS):
        return InputError(
            f"{name} is a launcher's option, not one of hvdtrain; start ranks with: torchrun "
            "--nproc-per-node 2 -m hvdtrain, mpirun -np 2 hvdtrain, or horovodrun -np 2 hvdtrain"
        )
    extra = [word for word in sys.argv[2:] if _is_task(word) and f"({word})" in message]
    if extra and context and any(o.name == "task" for o in context.command.params):
        message += f"; to name a task: --task {extra[0]}"
    return InputError(f"{message} (see: {path} --help)")


# Options of launchers for the number of ranks and the hosts; `-np` reaches click as `-n`.
_LAUNCHER_OPTIONS = tuple("-n -N -H --np --num-proc --nnodes --host --world-size".split())


def _is_task(word: str) -> bool:
    """Return whether a word could be the value of `--task`."""
    return word in TASKS or ".py" in word or (":" in word and not word.startswith("-"))

"""`hvdtrain doctor`: what works on this machine, and how to repair what does not."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Iterator

import click

from hvdtrain.cli.command_options import count, option
from hvdtrain.doctor.finding import Finding, is_blocked, unmet
from hvdtrain.errors import InputError, did_you_mean
from hvdtrain.launch.host_list import choose_slots, parse_host_list


@click.command(
    "doctor",
    params=[
        count(
            "-np --np ranks",
            "Ranks in each collective.  [default: 2, or all slots of --hosts]",
        ),
        option("-H --hosts", "Check these hosts over ssh, and their ranks.", metavar="A:2,B:2"),
        option(
            "--need",
            "What must work: names of checks, backends, transports or arms, such as horovod,mpi.  "
            "[default: training over one transport]",
            metavar="NAME,...",
            default="",
        ),
        option("--no-collectives", "Start no ranks.", is_flag=True),
        option(
            "--timeout timeout_s",
            "A collective that takes longer has failed.",
            type=click.FloatRange(min=1),
            default=20.0,
            show_default=True,
            metavar="SECONDS",
        ),
        option("--clean", "First remove what killed jobs left behind.", is_flag=True),
        option("--json as_json", "Print JSON instead of lines.", is_flag=True),
    ],
)
def command(
    ranks: int | None,
    hosts: str | None,
    need: str,
    no_collectives: bool,
    timeout_s: float,
    clean: bool,
    as_json: bool,
) -> None:
    """Check what works on this machine: software, limits, network, and every collective.

    Each problem comes with the command that repairs it. The collectives run on real ranks, under
    each launcher, on every backend and transport. Their results are checked, and their times are
    measured with 1 MiB a rank.

    \b
    exit code 0   all of --need works; without --need, training over at least one transport
              1   it does not
              2   an option is wrong
    """
    from hvdtrain.doctor import remains
    from hvdtrain.doctor.arm_checks import all_arms, check_arms
    from hvdtrain.doctor.checks import run_checks
    from hvdtrain.doctor.findings_display import FindingsDisplay
    from hvdtrain.doctor.host_checks import check_hosts
    from hvdtrain.doctor.software import versions
    from hvdtrain.system.machine import usable_gpus

    chosen = choose_slots(parse_host_list(hosts), ranks, None, None) if hosts else []
    size = ranks or sum(host.slots for host in chosen) or 2
    if size < 2 and not no_collectives:
        raise InputError("--np 1: a collective takes 2 ranks; or give --no-collectives")
    needs = _needs(need)
    for path in remains.clean() if clean else ():
        click.echo(f"removed {path}", err=as_json)
    found: list[Finding] = []

    def findings() -> Iterator[Finding]:
        yield from check_hosts(chosen) if chosen else run_checks(size)
        if not no_collectives and not is_blocked(found):
            arms, left_out = all_arms(size, usable_gpus(), chosen)
            yield from check_arms(arms, timeout_s, display.show)
            yield from left_out

    with FindingsDisplay(is_silent=as_json) as display:
        for finding in findings():
            found.append(finding)
            display.add(finding)
    problems = unmet(found, needs)
    if as_json:
        report = {
            "host": socket.gethostname(),
            "works": not problems,
            "problems": problems,
            "versions": versions(),
            "findings": [*map(dataclasses.asdict, found)],
        }
        click.echo(json.dumps(report, indent=1))
    else:
        works = [f.name for f in found if f.is_arm and f.works] or ["all that was asked for"]
        click.echo(f"{'does not work' if problems else 'works'}: {', '.join(problems or works)}")
    if problems:
        raise click.exceptions.Exit(1)


def _needs(text: str) -> list[str]:
    """Return the names in --need. Raises InputError for one that no finding can have."""
    from hvdtrain.backends.engines import LAUNCHER_OF
    from hvdtrain.doctor.checks import CHECKS

    known = dict.fromkeys(CHECKS)
    for backend, transports in LAUNCHER_OF.items():
        arms = [f"{backend}/{transport}" for transport in transports]
        known |= dict.fromkeys((backend, *transports, *arms))
    needs = [name.strip() for name in text.split(",") if name.strip()]
    for need in needs:
        if need not in known:
            raise InputError(
                f"--need {need}: {did_you_mean(need, known)}one of: {', '.join(known)}"
            )
    return needs

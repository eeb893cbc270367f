"""The probe: takes the steps of any training command, whose scripts know nothing of it.

    sitecustomize     Python imports it at the start of each process of the command; it waits for
                      torch.optim, and loads `hvdtrain_probe` with it; its ranks meet at a port of
                      their own
    hvdtrain_probe    in each rank: hooks around the steps of its optimizer, which answer the calls
                      of the comparison and hold the rank until it may take more steps

Both import nothing of hvdtrain: a command may run in an environment that lacks it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
VARIABLE = "HVDTRAIN_PROBE"
"""Number of the optimizer, what a rank does as it starts, the port and the address, with blanks
between.

b: binds itself to its share of the host's cores; t: takes as many threads as its share has cores.
A number: the process id of the comparison.
"""


def environment(
    env: Mapping[str, str],
    address: Path,
    port: int,
    pin: bool = False,
    optimizer: int = 1,
    shares_cores: bool = False,
) -> dict[str, str]:
    """Return the environment of a command whose ranks shall connect to the Unix socket `address`:
    PYTHONPATH and HVDTRAIN_PROBE, which a launcher must pass on to ranks on other hosts.

    `port`: ranks that no torchrun starts meet at ports that follow from it and from those that
    their script has fixed.
    `pin`: bind each rank to its share of the host's cores as it starts. `optimizer`: which one's
    steps are taken, by the order of their first steps. `shares_cores`: unless `env` says
    how many threads, each rank takes its share of the cores, whatever its launcher sets.
    """
    sets_threads = shares_cores and "OMP_NUM_THREADS" not in env
    paths = [str(FOLDER), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **env,
        "PYTHONPATH": os.pathsep.join(paths),
        VARIABLE: f"{optimizer} {'b' * pin}{'t' * sets_threads}{os.getpid()} {port} {address}",
    }

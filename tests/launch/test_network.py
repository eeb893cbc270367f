"""Which network the ranks use: several interfaces, IPv6 alone, no DNS; hosts are namespaces."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.job import addresses
from tests.environments import rows
from tests.forkserver import warm
from tests.launch.test_rendezvous import (
    check_met,
    job_id,
    namespaces,
    rendezvous_of,
    step_on_two_hosts,
)
from tests.launching import clean_env, run, run_all, succeed, variables

SCRIPT = """
import torch
import hvdtrain.hvd as hvd
from hvdtrain import open_backend
with open_backend("ddp") as backend:
    print(f"ddp {backend.all_reduce(torch.ones(3), 'sum').tolist()} on", backend.transport)
    print(backend.world, "network", backend.describe()["network"])
hvd.init()
print("hvd", hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist())
"""
UNKNOWN = "SLURM_STEP_NODELIST=no-such-host[1-2]"
# They need root, and are not in `make test`.
NAMESPACES = pytest.mark.exhaustive
# One host's name and /etc/hosts, which the other does not share
HOST = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def run_on(hosts: tuple[str, str], names: str, address: str, folder: Path) -> str:
    """Run SCRIPT as one rank on each host, which has these names; return the output of both."""
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}\n")
    commands = []
    for rank, host in enumerate(hosts):
        inside = ["ip", "netns", "exec", host, "unshare", "--mount", "--uts", "sh", "-c", HOST]
        inside += ["sh", f"node{rank}", str(folder / "hosts")]
        line = warm([*inside, sys.executable, "-c", SCRIPT])
        env = variables(f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR={address} MASTER_PORT=29581")
        commands.append((line, env))
    output = run_all(*commands)
    assert output.count("ddp [2.0, 2.0, 2.0] on gloo") == 2, output
    assert output.count("hvd [2.0, 2.0, 2.0]") == 2, output
    return output


# A second interface with the default route, over which the other host cannot be reached
WRONG = """
-n {0} link add wrong type veth peer nowhere
-n {1} link add wrong type veth peer nowhere
-n {0} link set nowhere up
-n {1} link set nowhere up
-n {0} addr add 10.78.0.1/24 dev wrong
-n {1} addr add 10.78.0.2/24 dev wrong
-n {0} link set wrong up
-n {1} link set wrong up
-n {0} route replace default dev wrong
-n {1} route replace default dev wrong
"""
# A bridge with the same address on both, as Docker's
BRIDGE = """
-n {0} link add docker0 type bridge
-n {1} link add docker0 type bridge
-n {0} addr add 172.17.0.1/16 dev docker0
-n {1} addr add 172.17.0.1/16 dev docker0
-n {0} link set docker0 up
-n {1} link set docker0 up
"""
IPV6 = """
-n {0} addr flush dev {link}a
-n {1} addr flush dev {link}b
-n {0} addr add fd77::1/64 dev {link}a nodad
-n {1} addr add fd77::2/64 dev {link}b nodad
"""


@NAMESPACES
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("commands", "names"),
    [
        pytest.param(WRONG, "10.78.0.1 node0\n10.78.0.2 node1", id="a wrong link"),
        pytest.param(BRIDGE, "172.17.0.1 node0 node1", id="a bridge"),
        pytest.param(WRONG, "", id="names that do not resolve"),
        # As Debian has it in /etc/hosts: Gloo would tell the other host 127.0.1.1.
        pytest.param("", "127.0.1.1 node0 node1", id="names that are loopback addresses"),
    ],
)
def test_gloo_takes_the_route_to_rank_0(commands: str, names: str, tmp_path: Path) -> None:
    """Not the address of the host's name, over which the other host cannot be reached."""
    with namespaces(commands) as hosts:
        output = run_on(hosts, names, "10.77.0.1", tmp_path)
    link = f"hv{os.getpid()}"
    to_rank1 = f"{link}a 10.77.0.1: on the route to another host, 10.77.0.2"
    assert f"rank 0/2 network {to_rank1}" in output, output
    assert f"rank 1/2 network {link}b 10.77.0.2: on the route to rank 0" in output, output


@NAMESPACES
@pytest.mark.timeout(120)
def test_hosts_without_ipv4(tmp_path: Path) -> None:
    with namespaces(IPV6) as hosts:
        output = run_on(hosts, "::1 localhost\nfd77::1 first", "first", tmp_path)
    assert f"rank 1/2 network hv{os.getpid()}b fd77::2: on the route to rank 0" in output, output


@NAMESPACES
def test_addresses_that_are_published_do_not_depend_on_the_default_route() -> None:
    """Rank 0 under mpirun offers all; those of bridges last, for every host may have them."""
    code = (
        "from hvdtrain.job.addresses import own_addresses as a; "
        "from hvdtrain.job.world import World; "
        "print('offers', a(World(0, 2, 0, 1, 0, 2, 'openmpi')))"
    )
    with namespaces(BRIDGE + WRONG) as hosts:
        line = warm(["ip", "netns", "exec", hosts[0], sys.executable, "-c", code])
        found = re.findall(r"'([\d.]+)'", succeed(run(line)).partition("offers")[2])
    assert found.index("10.77.0.1") < found.index("172.17.0.1"), found
    assert "10.78.0.1" in found


@NAMESPACES
@pytest.mark.parametrize("more", [UNKNOWN, f"{UNKNOWN} SLURM_LAUNCH_NODE_IPADDR=10.77.0.1", ""])
def test_srun_on_two_hosts(more: str) -> None:
    """Without DNS: srun's own host is the first of the job, and its address may be known."""
    job = job_id()
    envs = [step_on_two_hosts(rank, job, **variables(more)) for rank in range(2)]
    with namespaces() as hosts:
        got = rendezvous_of(*envs, hosts=hosts, timeout_s=4 if more == UNKNOWN else 20)
    if more != UNKNOWN:
        check_met(got, f"{job}-0", [0, 1, 0, 2], [0, 1, 1, 2])
    else:
        said = "no-such-host1 does not resolve; set MASTER_ADDR and MASTER_PORT"
        assert said in got[1]["error"], got


# The user's own choice


INTERFACES = """
GLOO_SOCKET_IFNAME=lo,eth7 HOROVOD_GLOO_IFACE=eth7 | lo 127.0.0.1: GLOO_SOCKET_IFNAME
HOROVOD_GLOO_IFACE=lo   | lo 127.0.0.1: HOROVOD_GLOO_IFACE
                        | None
GLOO_SOCKET_IFNAME=eth7 | GLOO_SOCKET_IFNAME=eth7 is not an interface .* choose one of .*lo.*
"""


@pytest.mark.parametrize(("env", "expected"), rows(INTERFACES))
def test_the_interface_that_the_user_names(env: str, expected: str) -> None:
    with patch.dict(os.environ, clean_env(variables(env)), clear=True):
        try:
            found = str(addresses.network_in_use())
        except LaunchError as error:
            found = str(error)
    assert re.fullmatch(expected, found), found

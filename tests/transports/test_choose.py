"""Which transport is chosen, and why."""

from __future__ import annotations

import dataclasses
import os
from importlib.metadata import entry_points

import pytest
import torch

from hvdtrain import BackendOptions, TrainConfig, open_backend, transports
from hvdtrain.backends import load
from hvdtrain.cli.train import command
from hvdtrain.errors import BackendUnavailable, InputError
from hvdtrain.job.world import World
from tests.environments import rows


def world(text: str = "torchrun 2 1") -> World:
    """Return the world of rank 0 of a launcher, with so many ranks on so many hosts."""
    launcher, size, hosts = text.split()
    return World(0, int(size), 0, int(size) // int(hosts), 0, int(hosts), launcher, "a test")


ALONE = world("none 1 1")


CHOICES = """
auto   | cuda | torchrun 2 1 | nccl               | on CUDA
auto   | cpu  | none 1 1     | gloo               | one rank
auto   | cpu  | torchrun 2 1 | shm                | all ranks on one host
auto   | cpu  | openmpi 2 1  | shm                | all ranks on one host
auto   | cpu  | openmpi 4 2  | mpi                | several hosts under openmpi
auto   | cpu  | srun 4 2     | shm                | several ranks a host
auto   | cpu  | srun 3 2     | shm                | several ranks a host
auto   | cpu  | srun 2 2     | gloo               | ranks on several hosts
gloo   | cpu  | openmpi 4 2  | gloo               | as requested
shm    | cpu  | openmpi 4 2  | shm                | as requested
mpi    | cpu  | srun 4 2     | mpi                | as requested
pigeon | cpu  | torchrun 2 1 | InputError         | one of: auto, nccl, gloo, shm, mpi
mpi    | cpu  | torchrun 2 1 | BackendUnavailable | torchrun has started the ranks, not mpirun
shm    | cuda | torchrun 2 1 | BackendUnavailable | shm supports CPU tensors
"""


@pytest.mark.parametrize(("requested", "device", "about", "expected", "why"), rows(CHOICES))
def test_choice(requested: str, device: str, about: str, expected: str, why: str) -> None:
    try:
        chosen, reason = transports.choose(requested, torch.device(device), world(about))
    except (InputError, BackendUnavailable) as error:
        chosen, reason = type(error).__name__, str(error)
    assert chosen == expected
    assert why in reason


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo is taken, and the reason says why; who asks for shm is told."""
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/proc/self/fd")
    for about in ("torchrun 2 1", "torchrun 4 2"):
        test_choice("auto", "cpu", about, "gloo", "no shared memory here: ")
    test_choice("shm", "cpu", "torchrun 2 1", "BackendUnavailable", "/proc is not mounted")


def test_a_choice_that_a_backend_does_not_have_is_said() -> None:
    said = []
    for transport in ("auto", "shm"):
        options = BackendOptions(device="cpu", transport=transport)
        with open_backend("single", ALONE, options) as backend:
            said.append(backend.reason)
    asked = "transport shm was asked for, but single has none to choose"
    assert said == ["as requested", f"as requested; {asked}"]


VARIABLES = """
HVDTRAIN_DEVICE            | cpu     | gpu
HVDTRAIN_TRANSPORT         | gloo    |  # checked when the backend is opened
HVDTRAIN_TIMEOUT           | 7       | soon
HVDTRAIN_BUCKET_MIB        | 2.5     | -1
HVDTRAIN_BUFFERS           | average | mean
HVDTRAIN_UNUSED_PARAMETERS | zero    | none
HVDTRAIN_COMPRESSION       | fp16    | fp8
HVDTRAIN_SHARD_OPTIMIZER   | yes     | perhaps
"""


def test_variables_mean_in_a_loop_of_ones_own_what_they_mean_to_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = [list(map(str, row.values)) for row in rows(VARIABLES)]
    assert len(table) == len(dataclasses.fields(BackendOptions))
    for name, value, _ in table:
        monkeypatch.setenv(name, value)
    values = command.make_context("train", []).params
    assert BackendOptions() == TrainConfig(**values).backend_options()
    assert BackendOptions(timeout_s=9, buffers="local").timeout_s == 9  # code counts before them
    for name, _, wrong in table:
        if wrong:
            with monkeypatch.context() as patched:
                patched.setenv(name, wrong)
                with pytest.raises(InputError, match=f"{name}={wrong} must be "):
                    BackendOptions()


def test_the_backend_of_a_loop_of_ones_own_may_be_in_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HVDTRAIN_BACKEND", "compat")
    monkeypatch.setenv("HVDTRAIN_TIMEOUT", "7")
    with open_backend(world=ALONE) as backend:
        assert (backend.name, backend.options.timeout_s) == ("compat", 7)
    with open_backend("single", ALONE) as backend:
        assert backend.name == "single"


def test_compat_carries_cuda_by_nccl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.backends.base.pick_device", lambda *_: torch.device("cuda", 0))
    with pytest.raises(BackendUnavailable, match="compat sends CUDA tensors over nccl, not gloo"):
        load("compat")(world(), BackendOptions(transport="gloo"))


def test_torch_finds_the_backends_without_an_import() -> None:
    """torch from 2.14.1 on calls the entry point that has a backend's name."""
    found = {point.name: point for point in entry_points(group="torch.distributed.backends")}
    for name in ("shm", "mpi4py"):
        found[name].load()()
        assert torch.distributed.is_backend_available(name)

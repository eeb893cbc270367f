"""launchers/kubernetes/: the manifests against their schemas, and the commands in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from tests.forkserver import warm
from tests.launching import BIN, ROOT, run

FOLDER = ROOT / "launchers" / "kubernetes"
SHORT = ["--task", "mlp", "--set", "width=16", "--set", "samples=256", "--max-steps", "3"]


def load(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods(part: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod's specification in a manifest."""
    if isinstance(part, dict):
        if "containers" in part:
            yield part
        for value in part.values():
            yield from pods(value)
    elif isinstance(part, list):
        for value in part:
            yield from pods(value)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_pods(name: str) -> None:
    for manifest in load(name):
        assert manifest["kind"] == "TrainJob" or list(pods(manifest))
        for spec in pods(manifest):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
            kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
            mounted = {m["name"] for c in spec["containers"] for m in c.get("volumeMounts", [])}
            assert mounted == {volume["name"] for volume in spec.get("volumes", [])}


@pytest.mark.parametrize("name", ["trainjob.yaml", "mpi-runtime.yaml"])
def test_trainer_v2(name: str) -> None:
    for manifest in load(name):
        model = getattr(models, f"TrainerV1alpha1{manifest['kind']}")
        # The models drop unknown fields, so a misspelt one is missing after the round trip.
        assert without_empty(model.from_dict(manifest).to_dict()) == manifest


def without_empty(part: Any) -> Any:
    """Return a manifest without what the models add: empty fields and lists."""
    if isinstance(part, dict):
        found = {key: without_empty(value) for key, value in part.items()}
        return {key: value for key, value in found.items() if value not in (None, [], {})}
    if isinstance(part, list):
        return [without_empty(value) for value in part]
    return part


def exactly(**fields: Any) -> dict[str, Any]:
    """Return the JSON schema of an object with these fields, all of them and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


TEXT = {"type": "string"}
REPLICAS = exactly(replicas={"type": "integer"}, template=exactly(spec={"type": "object"}))
MPI_JOB = exactly(
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=exactly(name=TEXT),
    spec=exactly(
        slotsPerWorker={"type": "integer"},
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        sshAuthMountPath=TEXT,
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        runPolicy=exactly(cleanPodPolicy={"enum": ["None", "Running", "All"]}),
        mpiReplicaSpecs=exactly(Launcher=REPLICAS, Worker=REPLICAS),
    ),
)
"""The fields of v2beta1 that the manifest uses: the MPI operator publishes no Python models."""


def test_mpi_job() -> None:
    (manifest,) = load("mpijob.yaml")
    jsonschema.validate(manifest, MPI_JOB)
    spec = manifest["spec"]
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    ranks = int(launcher["args"][launcher["args"].index("-np") + 1])
    assert ranks == spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]


def command_of(name: str, number: int = 0) -> list[str]:
    """Return the command that a manifest starts the ranks with, in this virtual environment."""
    manifest = load(name)[number]
    where = manifest["spec"].get("trainer")
    if where is None:
        launcher = manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
        (where,) = launcher["containers"]
    command = [*where["command"], *where.get("args", [])]
    del command[command.index("--task") :]
    return [word.replace("/opt/venv/bin/", "") for word in command]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("trainjob.yaml", 0),
        pytest.param("mpijob.yaml", 0, marks=pytest.mark.exhaustive),
        pytest.param("mpi-runtime.yaml", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_the_command_trains(name: str, number: int, tmp_path: Path) -> None:
    """In the environment that the operator documents, with two ranks in one pod."""
    env = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
    env |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": "29533"}
    command = command_of(name, number)
    if command[0] == "mpirun":
        hosts = tmp_path / "hostfile"
        hosts.write_text("localhost slots=2\n")
        env = {"OMPI_MCA_orte_default_hostfile": str(hosts), "K_MPI_JOB_ROLE": "launcher"}
        env |= {"OMPI_MCA_orte_keep_fqdn_hostnames": "true"}
        command = ["2" if word == "8" else word for word in command]
    env["PATH"] = f"{BIN}:/usr/bin:/bin"
    done = run(warm([*command, *SHORT, "--run-dir", tmp_path / "run"]), env=env, timeout=100)
    assert done.code == 0, done.output
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["outcome"], record["world"]["size"]) == ("finished", 2)

"""launchers/kubernetes/: the manifests against the published schemas. test_parity.py runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.launching import ROOT

FOLDER = ROOT / "launchers" / "kubernetes"


def load(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods(part: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod's specification in a manifest."""
    if isinstance(part, dict):
        if "containers" in part:
            yield part
        part = list(part.values())
    if isinstance(part, list):
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
        from kubeflow_trainer_api import models  # seconds

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


def test_mpi_job() -> None:
    """The MPI operator publishes no models: what a cluster needs to start these ranks."""
    (manifest,) = load("mpijob.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = manifest["spec"]
    replicas = spec["mpiReplicaSpecs"]
    assert (set(replicas), replicas["Launcher"]["replicas"]) == ({"Launcher", "Worker"}, 1)
    (launcher,), (worker,) = (pod["containers"] for pod in pods(manifest))
    ranks = int(launcher["args"][launcher["args"].index("-np") + 1])
    assert ranks == spec["slotsPerWorker"] * replicas["Worker"]["replicas"]
    # mpirun reaches the workers' sshd with the keys of the user that both run as.
    assert worker["command"][0].endswith("/sshd")
    assert Path(spec["sshAuthMountPath"]).parent == Path(worker["args"][-1]).parent
    assert launcher["securityContext"] == worker["securityContext"]


def command_of(name: str, number: int = 0) -> list[str]:
    """Return the command that a manifest starts the ranks with, in this virtual environment."""
    manifest = load(name)[number]
    where = manifest["spec"].get("trainer") or next(pods(manifest))["containers"][0]
    command = [*where["command"], *where.get("args", [])]
    del command[command.index("--task") :]
    return [word.replace("/opt/venv/bin/", "") for word in command]

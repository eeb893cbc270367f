"""The blocks of docs/libraries.md: other libraries over `shm` train as they do over Gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.environments import environment
from tests.launching import ROOT, run

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(480)]
PAGE = ROOT / "docs" / "libraries.md"
# One write for each line: the ranks share stdout, and a progress bar may have left a line open.
PRINT_PARAMETERS = """
import hashlib, os, sys
bits = b"".join(p.detach().numpy().tobytes() for p in plain.parameters())
sys.stdout.write(f"\\ntrained {hashlib.sha256(bits).hexdigest()}\\n")
sys.stdout.flush()
if torch.distributed.is_initialized():
    torch.distributed.barrier()
os._exit(0)  # Gloo may abort as it is torn down, and torchrun then ends the other rank
"""
UNTRAINED = "\nplain = model\n" + PRINT_PARAMETERS
METRIC = """\
import os, sys
sys.stdout.write(f"\\nover all ranks: {metric.compute().item()}\\n")
sys.stdout.flush()
torch.distributed.barrier()
os._exit(0)
"""


def block(section: str) -> str:
    """Return the Python of a section; of "" that with which the others begin."""
    text = PAGE.read_text()
    part = text.partition(f"\n## {section}\n")[2] if section else text
    (found, *_) = re.findall(r"```python\n(.*?)```", part.partition("\n## ")[0], re.DOTALL)
    return str(found)


def results(program: str, backend: str, tmp_path: Path, *options: str) -> list[str]:
    """Run a program on two ranks; return what it prints of its results, sorted."""
    folder, packages = environment("libraries", "python")
    script = tmp_path / f"program_{backend}.py"
    script.write_text(program.replace('"shm"', f'"{backend}"'))
    line: list[str | Path] = [folder / "python", "-m", "torch.distributed.run"]
    line += ["--nproc-per-node", "2", *options, script]
    finished = run(line, cwd=tmp_path, env=packages, timeout=220)
    assert finished.code == 0, finished.output
    found = sorted(re.findall(r"^(?:trained|over all ranks:) \S+$", finished.output, re.MULTILINE))
    assert len(found) == 2, finished.output
    return found


@pytest.mark.parametrize(
    "section",
    ["accelerate", "Lightning Fabric", "Lightning", "Hugging Face's Trainer", "ignite"],
)
def test_a_library_trains_over_shm_as_over_gloo(section: str, tmp_path: Path) -> None:
    program = block("") + "plain = model\n" + block(section) + PRINT_PARAMETERS
    over_shm = results(program, "shm", tmp_path)
    assert over_shm == results(program, "gloo", tmp_path)
    assert over_shm[0] == over_shm[1]
    if section == "ignite":  # it was wrong in silence
        untrained = block("") + 'torch.distributed.init_process_group("shm")' + UNTRAINED
        assert over_shm != results(untrained, "shm", tmp_path)


@pytest.mark.parametrize("backend", ["shm", "horovod"])
def test_ignite_starts_its_own_group(backend: str, tmp_path: Path) -> None:
    own = block("ignite").partition("\n\ntorch.distributed.init_process_group")[0]
    parallel = 'with idist.Parallel("shm") as parallel:\n    parallel.run(train)\n'
    program = block("") + "plain = model\n" + own + "\n\n" + parallel + PRINT_PARAMETERS
    options = ["-m", "hvdtrain.hvd"] if backend == "horovod" else []
    found = results(program, backend, tmp_path, *options)
    assert found == results(program, "gloo", tmp_path)
    assert found[0] == found[1]


@pytest.mark.parametrize("when", ["before the transports", "after the group"])
def test_ignite_may_be_imported_at_any_time(when: str, tmp_path: Path) -> None:
    own, group = block("ignite"), 'torch.distributed.init_process_group("shm")\n'
    if when == "after the group":
        own = group + own.replace(group, "")
    program = block("") + "plain = model\n" + own + PRINT_PARAMETERS
    expected = results(program, "gloo", tmp_path)
    if when == "before the transports":
        program = "import ignite.distributed\n" + program
    assert results(program, "shm", tmp_path) == expected


def test_a_metric_is_that_of_all_ranks(tmp_path: Path) -> None:
    program = block("") + block("torchmetrics")
    program = program.replace('print("over all ranks:", metric.compute().item())', METRIC)
    found = results(program, "shm", tmp_path)
    assert found[0] == found[1]
    assert found == results(program, "gloo", tmp_path)


@pytest.mark.parametrize(
    ("section", "name", "program"),
    [
        ("Ray's TorchTrainer", "ray", "ray"),
        ("Spark's TorchDistributor", "spark", "spark-submit"),
    ],
)
def test_an_engine_trains_over_shm_as_over_gloo(
    section: str, name: str, program: str, tmp_path: Path
) -> None:
    folder, packages = environment(name, program)
    found = []
    for backend in ("shm", "gloo"):
        script = tmp_path / f"program_{backend}.py"
        text = block(section).replace("/tmp/ray-results", str(tmp_path / "results"))
        script.write_text(text.replace('"shm"', f'"{backend}"'))
        env = {**packages, "PYSPARK_PYTHON": str(folder / "python")}
        finished = run([folder / "python", script], cwd=tmp_path, env=env, timeout=220)
        assert finished.code == 0, finished.output
        printed = re.findall(r"weights (\[\[.*\]\])", finished.output)
        assert printed, finished.output
        found.append(set(printed))
    assert found[0] == found[1]
    assert len(found[0]) == 1

"""The blocks of docs/libraries.md: other libraries over `shm` train as they do over Gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.environments import environment
from tests.launching import run, succeed
from tests.test_manual import blocks

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(480)]
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
METRIC = """\
import os, sys
sys.stdout.write(f"\\nover all ranks: {metric.compute().item()}\\n")
sys.stdout.flush()
torch.distributed.barrier()
os._exit(0)
"""


def block(section: str) -> str:
    """Return the Python of a section; of "" that with which the others begin."""
    return next(found.text for found in blocks("docs/libraries.md") if found.section == section)


def results(program: str, backend: str, tmp_path: Path, *options: str) -> list[str]:
    """Run a program on two ranks; return what it prints of its results, sorted."""
    folder, packages = environment("libraries", "python")
    script = tmp_path / f"program_{backend}.py"
    script.write_text(program.replace('"shm"', f'"{backend}"'))
    line: list[str | Path] = [folder / "python", "-m", "torch.distributed.run"]
    line += ["--nproc-per-node", "2", *options, script]
    output = succeed(run(line, cwd=tmp_path, env=packages, timeout=220))
    found = sorted(re.findall(r"^(?:trained|over all ranks:) \S+$", output, re.MULTILINE))
    assert len(found) == 2, output
    return found


@pytest.mark.parametrize(
    "section",
    ["accelerate", "Lightning Fabric", "Lightning", "Hugging Face's Trainer", "torchmetrics"],
)
def test_a_library_does_over_shm_what_it_does_over_gloo(section: str, tmp_path: Path) -> None:
    program = block("") + "plain = model\n" + block(section) + PRINT_PARAMETERS
    program = program.replace('print("over all ranks:", metric.compute().item())', METRIC)
    over_shm = results(program, "shm", tmp_path)
    assert over_shm == results(program, "gloo", tmp_path)
    assert over_shm[0] == over_shm[1]


def test_ignite_trains_as_on_gloo_however_it_is_started(tmp_path: Path) -> None:
    """Imported at any time, in a group of the script's or of its own, and not untrained, which it
    was in silence.
    """
    own, group = block("ignite"), '\n\ntorch.distributed.init_process_group("shm")'
    start = block("") + "plain = model\n"
    parallel = '\nwith idist.Parallel("shm") as parallel:\n    parallel.run(train)\n'
    itself = start + own.partition(group)[0] + parallel + PRINT_PARAMETERS
    ordinary = start + own + PRINT_PARAMETERS
    expected = results(ordinary, "gloo", tmp_path)
    assert expected[0] == expected[1]
    assert results(start + group + PRINT_PARAMETERS, "shm", tmp_path) != expected
    late = f"{start}{group}\n" + own.replace(group, "") + PRINT_PARAMETERS
    for program in (ordinary, "import ignite.distributed\n" + ordinary, late, itself):
        assert results(program, "shm", tmp_path) == expected, program
    assert results(itself, "horovod", tmp_path, "-m", "hvdtrain.hvd") == expected


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
    over_shm = block(section).replace("/tmp/ray-results", str(tmp_path / "results"))
    over_shm = over_shm.replace("ray.init(", "ray.init(ignore_reinit_error=True, ")
    over_gloo = over_shm.replace('"shm"', '"gloo"').replace('"weights"', '"expected"')
    script = tmp_path / "program.py"
    script.write_text(f"{over_shm}\n{over_gloo}")  # in one engine, whose start takes long
    env = {**packages, "PYSPARK_PYTHON": str(folder / "python")}
    output = succeed(run([folder / "python", script], cwd=tmp_path, env=env, timeout=300))
    found = [set(re.findall(rf"{word} (\[\[.*\]\])", output)) for word in ("weights", "expected")]
    assert found[0] == found[1], output
    assert len(found[0]) == 1, output

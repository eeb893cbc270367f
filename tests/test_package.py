"""The wheel alone, and the sdist, in a new environment and away from the source tree.

pytest does it on this Python, without the site of the sdist. `make release-check` does it on
others, each with its torch, and writes benchmarks/results/release_check.json.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
import tempfile
import zipfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest

from hvdtrain.system import provenance
from tests.launching import ROOT, run, succeed

RECORD = ROOT / "benchmarks" / "results" / "release_check.json"
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]
HOROVOD = """
import horovod.torch as hvd
import torch
hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
model(torch.full((2, 4), float(hvd.rank()))).sum().backward()
optimizer.step()
assert hvd.allgather(model.weight.detach()).unique(dim=0).shape == (1, 4)
print(f"trained with {hvd.size()} ranks\\n", end="")  # one write: two ranks print at once
"""


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and from it the wheel; return the wheel and the sdist."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    succeed(run(command, timeout=300, env={"HVDTRAIN_PURE_PYTHON": "1"}))
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def check(python: str | Path, torch: str, folder: Path, site: bool) -> dict[str, str]:
    """Use the wheel and the sdist with a Python and a torch, or with that of constraints.txt, in an
    empty folder; return the versions found, and the result of pytest.

    `site`: in an environment of its own build the sdist's site, and run its tests there.
    """
    wheel, sdist = build(folder)
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "hvdtrain").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__" and path.suffix != ".so"
    }
    assert wheel.name.endswith("-py3-none-any.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    assert {name for name in packed if name.startswith("hvdtrain/")} == files

    environment = folder / "environment"
    succeed(run([python, "-m", "venv", environment], timeout=300))
    constraints = folder / "constraints.txt"
    pins = (ROOT / "constraints.txt").read_text()
    constraints.write_text(re.sub("(?m)^torch==.*", f"torch=={torch}", pins) if torch else pins)
    target = ["--python", str(environment / "bin" / "python")]
    options = ["--quiet", "--constraint", str(constraints)]
    install = [sys.executable, "-m", "pip", *target, "install", *options]
    succeed(run([*install, wheel], timeout=1800))
    found = use_wheel(environment / "bin", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = (path.parent for path in folder.glob("*/pyproject.toml"))
    if site:
        build_site(source, install, environment / "bin")
    tests = ["tests/compare/test_committed.py", "tests/compare/test_table.py"]
    options = ["-q", "-m", "not exhaustive", "-p", "no:cacheprovider"]
    interpreter = environment / "bin" / "python" if site else sys.executable
    line = [interpreter, "-m", "pytest", *options, *tests]
    output = succeed(run(line, timeout=300, cwd=source))
    return {**found, "figures": output.splitlines()[-1]}


def use_wheel(programs: Path, folder: Path) -> dict[str, str]:
    """Run each command that needs no extra, in an empty folder; return versions."""
    work = folder / "work"
    work.mkdir()
    path = {"PATH": f"{programs}:/usr/bin:/bin"}

    def output_of(*command: str) -> str:
        return succeed(run([programs / command[0], *command[1:]], 180, cwd=work, env=path))

    assert "compare" in output_of("hvdtrain", "--help")
    output_of("hvdtrain", "init", "my.py")
    trained = output_of(*TORCHRUN, "-m", "hvdtrain", "--task", "my.py:MyTask")
    assert "2 ranks on 1 host" in trained
    assert "ddp over shm" in trained
    assert "params_sha256" in trained
    (work / "horovod_script.py").write_text(HOROVOD)
    output = output_of(*TORCHRUN, "-m", "hvdtrain.hvd", "horovod_script.py")
    assert output.count("trained with 2 ranks") == 2
    # The default task has its data from scikit-learn, which is in the extra `demo`.
    without = run([programs / "hvdtrain"], 180, cwd=work, env=path)
    (line,) = without.lines("pip install scikit-learn")
    assert without.code != 0
    assert line.startswith("error: ")
    assert "Traceback" not in without.output
    found = output_of("python", "-c", "import sys, torch; print(sys.version, torch.__version__)")
    return {"python": found.split()[0], "torch": found.split()[-1]}


def build_site(source: Path, install: list[str], programs: Path) -> None:
    """Install what the site and the tests of an unpacked sdist need, and build the site."""
    groups = ["--group", "dev", "--group", "docs"]
    succeed(run([*install, ".[compare]", *groups], timeout=600, cwd=source))
    line: list[str | Path] = [programs / "python", "-m", "properdocs", "build", "--quiet"]
    succeed(run([*line, "--config-file", "mkdocs.yml"], timeout=400, cwd=source))
    assert (source / "build" / "site" / "index.html").exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_the_wheel_and_the_sdist_on_this_python(tmp_path: Path) -> None:
    assert check(sys.executable, "", tmp_path, site=False)["torch"] == version("torch")


def main(environments: list[str]) -> None:
    """Check each PYTHON or PYTHON=TORCH, and write what has passed."""
    passed = []
    for environment in environments:
        python, _, torch = environment.partition("=")
        with tempfile.TemporaryDirectory(prefix="hvdtrain-release-") as folder:
            passed.append(check(python, torch, Path(folder), site=True))
        print("passed:", *passed[-1].values())
    found = {"commit": provenance.commit(), "date": str(date.today()), "passed": passed}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

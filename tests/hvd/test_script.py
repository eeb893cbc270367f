"""Scripts of Horovod's, run unchanged by `python -m hvdtrain.hvd`."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.forkserver import warm
from tests.launching import ROOT, run, succeed

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("hvd-script")

EXAMPLE = ROOT / "examples" / "horovod_script.py"
PYTHON = (sys.executable,)
OURS = (*PYTHON, "-m", "hvdtrain.hvd")
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")
MPIRUN = ("mpirun", "-np", "2", "--bind-to", "none")
HOROVODRUN = ("horovodrun", "-np", "2", "--gloo")
UNCHANGED = {
    "torchrun": (*TORCHRUN, "-m", "hvdtrain.hvd"),
    "mpirun": (*MPIRUN, *OURS),
    "horovodrun": (*HOROVODRUN, *OURS),
}


@pytest.fixture(scope="session")
def no_horovod(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the real Horovod cannot be imported."""
    folder = tmp_path_factory.mktemp("no_horovod")
    (folder / "horovod").mkdir()
    (folder / "horovod" / "__init__.py").write_text("raise ImportError('the real Horovod')")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


# The example


def trained(command: list[str | Path], env: dict[str, str] | None = None) -> str:
    """What the example's parameters are in the end, on both ranks."""
    output = succeed(run(warm([*command, "--epochs", "2", "--no-cuda"]), env=env, timeout=100))
    assert "Trained on 2 ranks" in output
    digests: list[str] = re.findall(r"parameters ([0-9a-f]{64})", output)
    assert len(digests) == 2
    assert digests[0] == digests[1]
    return digests[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("horovodrun", ()),
        ("mpirun", ("--fp16-allreduce",)),
        ("torchrun", ("--batches-per-allreduce", "2")),
    ],
)
def test_the_example_trains_as_under_horovod(
    launcher: str, options: tuple[str, ...], no_horovod: dict[str, str]
) -> None:
    env = no_horovod if launcher != "horovodrun" else None  # which is Horovod's itself
    expected = trained([*HOROVODRUN, *PYTHON, EXAMPLE, *options])
    assert trained([*UNCHANGED[launcher], EXAMPLE, *options], env) == expected


# What `import horovod` gives

MODULES = """
import importlib, json, sys, hvdtrain.hvd
import horovod
import horovod.torch as hvd
from horovod.torch.mpi_ops import Average, synchronize
from horovod.common.exceptions import HorovodInternalError
from horovod.common import util
import horovod.torch.elastic.sampler
from horovod.torch.elastic.state import TorchState
from horovod.common.elastic import ObjectState, run_fn
from horovod.data import AsyncDataLoaderMixin

assert AsyncDataLoaderMixin is hvdtrain.hvd.data.AsyncDataLoaderMixin
assert hvd is hvdtrain.hvd and sys.modules["horovod"] is horovod and horovod.torch is hvd
assert hvd.elastic.TorchState is TorchState and hvd.synchronize is synchronize
assert horovod.torch.elastic.sampler is hvd.elastic.sampler and hvd.Average is Average
assert hvd.HorovodInternalError is HorovodInternalError and hvdtrain.hvd.util is util
assert horovod.run is hvdtrain.launch.runner.run and horovod.__version__ == "0.28.1"
assert importlib.util.find_spec("horovod.torch") is not None

from hvdtrain.hvd import alias
for name, here in alias.MODULES.items():
    assert importlib.import_module(name) is importlib.import_module(here), name
    found = horovod
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert found is sys.modules[name], name
alias.install()

lines = {}
others = "tensorflow mxnet keras torch.mpi_lib_v2 torch.engine nothing runner.launch "
others += "runner.common.util.hosts"
for name in others.split():
    try:
        importlib.import_module(f"horovod.{name}")
    except ImportError as error:
        lines[name] = str(error)
try:
    from horovod import tensorflow
except ImportError as error:
    lines["from"] = str(error)
assert len(lines) == 9, lines
for name, line in lines.items():
    assert "has Horovod for PyTorch only" in line and "with hvdtrain.run or hvdrun" in line
    assert "\\n" not in line, (name, line)
print("all well")
"""


def test_every_module_of_the_table_is_ours(tmp_path: Path, no_horovod: dict[str, str]) -> None:
    (tmp_path / "script.py").write_text(MODULES)
    assert "all well" in succeed(run(warm([*OURS, tmp_path / "script.py"]), env=no_horovod))


def test_plain_import_leaves_horovod_alone() -> None:
    script = (
        "import sys, hvdtrain.hvd, hvdtrain.hvd.alias\n"
        "assert not [name for name in sys.modules if name.startswith('horovod')]\n"
        "import horovod\n"
        "assert 'shim' not in horovod.__file__\n"
        "hvdtrain.hvd.alias.install()\n"
    )
    done = run(warm([*PYTHON, "-c", script]))
    assert done.code == 1
    assert "before hvdtrain could take its name" in done.output


CHILDREN = """
import sys
import horovod.torch as hvd
from torch.utils.data import DataLoader, Dataset

class Names(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        import horovod.torch
        return f"{horovod.torch.__name__} {horovod.torch.size is hvd.size}"

if __name__ == "__main__":
    loader = DataLoader(Names(), num_workers=1, multiprocessing_context=sys.argv[1])
    print([item for batch in loader for item in batch])
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.exhaustive
def test_children_find_us_too(method: str, tmp_path: Path, no_horovod: dict[str, str]) -> None:
    (tmp_path / "script.py").write_text(CHILDREN)
    # Not from the fork server, whose semaphores the children's tracker of resources would know.
    found = succeed(run([*OURS, tmp_path / "script.py", method], env=no_horovod))
    assert found == f"{['hvdtrain.hvd True'] * 2}\n"


@pytest.mark.exhaustive  # it starts without the fork server, which has imported hvdtrain
def test_the_shim_finds_the_rest(tmp_path: Path) -> None:
    """Where hvdtrain was in the working directory only, which a child does not have."""
    script = (
        "import sys\n"
        f"sys.path[:] = [sys.argv[1], *(p for p in sys.path if p not in ('', {str(ROOT)!r}))]\n"
        "import horovod.torch\n"
        "print(horovod.torch.__name__)"
    )
    done = run([*PYTHON, "-c", script, ROOT / "hvdtrain" / "hvd" / "shim"], cwd=tmp_path)
    assert succeed(done) == "hvdtrain.hvd\n"


# As python itself

ABOUT = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps([sys.argv, sys.path[0], __file__, __name__, main.__dict__ is globals(),
    __spec__ and __spec__.name, __package__, __doc__]))
def late():
    print("late", __name__, sys.modules["__main__"] is main, json is not None)
import atexit
atexit.register(late)
"""


@pytest.mark.parametrize(
    ("name", "folder"), [("scripts/about.py", ""), ("link.py", ""), ("-m about", "scripts")]
)
def test_it_runs_as_under_python(tmp_path: Path, name: str, folder: str) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "about.py").write_text(ABOUT)
    (tmp_path / "link.py").symlink_to(tmp_path / "scripts" / "about.py")
    arguments = [*name.split(), "--epochs", "5", "--help", "-m", "it's $HOME"]
    expected, found = (
        succeed(run([*command, *arguments], cwd=tmp_path / folder))
        for command in (PYTHON, warm(OURS))
    )
    end = "late" if folder else "\0"  # of a module: runpy puts our own __main__ back at the end
    assert found.partition(end)[0] == expected.partition(end)[0]


@pytest.mark.parametrize(
    "text",
    [
        "sys.exit(3)",
        "sys.exit('no such luck')",
        "raise KeyboardInterrupt",
        "raise ValueError('mine')",
        "this is no python",
        "sys.excepthook = lambda kind, error, trace: print('hook', error); raise ValueError(1)",
    ],
)
def test_it_ends_as_under_python(tmp_path: Path, text: str) -> None:
    script = tmp_path / "failing.py"
    script.write_text(f"import sys\n{text}\n")
    expected, found = run([*PYTHON, script]), run(warm([*OURS, script]))
    if "Interrupt" in text:  # in the traceback are lines of runpy
        expected, found = (replace(d, output=d.output.splitlines()[-1]) for d in (expected, found))
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py", "--epochs", "5"], "error: no such file: nowhere.py"),
        (
            ["-m", "tests.hvd"],
            "error: No module named tests.hvd.__main__; 'tests.hvd'",
        ),
        (["-m"], "error: -m needs the name of a module"),
        (["-x"], "error: no such option: -x"),
        ([], "usage: python -m hvdtrain.hvd SCRIPT"),
    ],
    ids=str,
)
def test_what_cannot_be_run(arguments: list[str], message: str) -> None:
    done = run(warm([*OURS, *arguments]))
    assert done.code == 2
    assert done.output.startswith(message)


def test_one_failing_rank_ends_the_job(tmp_path: Path) -> None:
    """With the traceback of the script alone. Other launchers: tests/death."""
    script = tmp_path / "failing.py"
    script.write_text(
        "import torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "hvd.allreduce(torch.ones(1), name='all')\n"
        "if hvd.rank() == 1: raise ValueError('mine')\n"
        "import time; time.sleep(600)\n"
    )
    done = run(warm([*UNCHANGED["torchrun"], script]), timeout=100)  # far from the script's end
    assert done.code != 0
    assert "ValueError: mine" in done.output
    assert "runpy" not in done.output

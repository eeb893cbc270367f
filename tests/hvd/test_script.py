"""Scripts of Horovod's, run unchanged by `python -m hvdtrain.hvd`."""

from __future__ import annotations

import itertools
import re
import sys
from functools import cache
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

OPTIONS = {
    "plain": (),
    "fp16": ("--fp16-allreduce",),
    "accumulate": ("--batches-per-allreduce", "2"),
}


def trained(command: list[str | Path], env: dict[str, str] | None = None) -> str:
    """What the example's parameters are in the end, on both ranks."""
    output = succeed(run(warm([*command, "--epochs", "2", "--no-cuda"]), env=env, timeout=100))
    assert "Trained on 2 ranks" in output
    digests: list[str] = re.findall(r"parameters ([0-9a-f]{64})", output)
    assert len(digests) == 2
    assert digests[0] == digests[1]
    return digests[0]


@cache
def by_horovod(options: str) -> str:
    return trained([*HOROVODRUN, *PYTHON, EXAMPLE, *OPTIONS[options]])


def test_the_example_does_not_know_us() -> None:
    code = EXAMPLE.read_text().split('"""', 2)[2]
    assert "hvdtrain" not in code
    assert code.count("import horovod.torch as hvd\n") == 1


@pytest.mark.exhaustive  # the real Horovod alone
def test_horovod_trains_the_same_by_mpi() -> None:
    assert trained([*MPIRUN, *PYTHON, EXAMPLE]) == by_horovod("plain")


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("horovodrun", "mpirun")),
    ],
)
def test_the_example_trains_as_under_horovod(launcher: str, no_horovod: dict[str, str]) -> None:
    env = no_horovod if launcher != "horovodrun" else None  # which is Horovod's itself
    assert trained([*UNCHANGED[launcher], EXAMPLE], env) == by_horovod("plain")


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ["fp16", "accumulate"])
def test_the_examples_options_do_as_under_horovod(options: str, no_horovod: dict[str, str]) -> None:
    command: list[str | Path] = [*UNCHANGED["torchrun"], EXAMPLE, *OPTIONS[options]]
    assert trained(command, no_horovod) == by_horovod(options)


@pytest.mark.exhaustive  # test_children_find_us_too has the same of smaller children
def test_loader_processes_of_the_example_find_us(no_horovod: dict[str, str]) -> None:
    command: list[str | Path] = [*UNCHANGED["torchrun"], EXAMPLE, "--workers", "1"]
    assert trained(command, no_horovod) == by_horovod("plain")


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(TORCHRUN, marks=pytest.mark.exhaustive), (*MPIRUN, *PYTHON)],
    ids=lambda line: line[0],
)
def test_one_line_changed_is_enough(
    launcher: tuple[str, ...], tmp_path: Path, no_horovod: dict[str, str]
) -> None:
    script = tmp_path / "train.py"
    text = EXAMPLE.read_text()
    script.write_text(text.replace("import horovod.torch as hvd", "import hvdtrain.hvd as hvd"))
    assert trained([*launcher, script], no_horovod) == by_horovod("plain")


def test_the_example_starts_its_own_ranks(tmp_path: Path, no_horovod: dict[str, str]) -> None:
    command: list[str | Path] = [*OURS, EXAMPLE, "--num-proc", "2", "--save", tmp_path / "model.pt"]
    assert trained(command, no_horovod) == by_horovod("plain")
    assert (tmp_path / "model.pt").exists()


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
from horovod.runner.common.util import hosts

assert AsyncDataLoaderMixin is hvdtrain.hvd.data.AsyncDataLoaderMixin
assert hosts.parse_hosts("a:2")[0].slots == 2
assert hvd is hvdtrain.hvd and sys.modules["horovod"] is horovod and horovod.torch is hvd
assert hvd.elastic.TorchState is TorchState and hvd.synchronize is synchronize
assert horovod.torch.elastic.sampler is hvd.elastic.sampler and hvd.Average is Average
assert hvd.HorovodInternalError is HorovodInternalError and hvdtrain.hvd.util is util
assert horovod.run is hvdtrain.hvd.runner.run and horovod.__version__ == "0.28.1"
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
others = "tensorflow mxnet keras spark torch.mpi_lib_v2 torch.engine nothing"
for name in others.split():
    try:
        importlib.import_module(f"horovod.{name}")
    except ImportError as error:
        lines[name] = str(error)
try:
    from horovod import tensorflow
except ImportError as error:
    lines["from"] = str(error)
assert len(lines) == 8, lines
for name, line in lines.items():
    assert "hvdtrain has Horovod for PyTorch only" in line and "\\n" not in line, (name, line)
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
    done = run([*PYTHON, "-c", script])
    assert done.code == 1
    assert "before hvdtrain could take its name" in done.output


CHILDREN = """
import multiprocessing, sys
import horovod.torch as hvd
from torch.utils.data import DataLoader, Dataset

class Names(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        import horovod.torch
        return f"{horovod.torch.__name__} {horovod.torch.size is hvd.size}"

def name(_):
    import horovod
    return horovod.torch.__name__

if __name__ == "__main__":
    for method in sys.argv[1:]:
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(name, [0]))
        loader = DataLoader(Names(), num_workers=1, multiprocessing_context=method)
        print(method, [item for batch in loader for item in batch])
"""


@pytest.mark.parametrize(
    "method",
    ["spawn", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("fork", "forkserver"))],
)
def test_children_find_us_too(method: str, tmp_path: Path, no_horovod: dict[str, str]) -> None:
    (tmp_path / "script.py").write_text(CHILDREN)
    found = succeed(run(warm([*OURS, tmp_path / "script.py", method]), env=no_horovod))
    expected = [f"{method} ['hvdtrain.hvd']", f"{method} {['hvdtrain.hvd True'] * 2}"]
    assert found.splitlines() == expected


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


@pytest.mark.parametrize("kind", ["script", "relative", "link", "folder", "module", "package"])
def test_it_runs_as_under_python(tmp_path: Path, kind: str) -> None:
    (tmp_path / "scripts" / "package").mkdir(parents=True)
    (tmp_path / "scripts" / "about.py").write_text(ABOUT)
    (tmp_path / "scripts" / "package" / "__init__.py").write_text("")
    (tmp_path / "scripts" / "package" / "__main__.py").write_text(ABOUT)
    (tmp_path / "link.py").symlink_to(tmp_path / "scripts" / "about.py")
    names: dict[str, tuple[list[str | Path], Path]] = {
        "script": ([tmp_path / "scripts" / "about.py"], tmp_path),
        "relative": (["scripts/about.py"], tmp_path),
        "link": (["link.py"], tmp_path),
        "folder": (["scripts/package"], tmp_path),
        "module": (["-m", "about"], tmp_path / "scripts"),
        "package": (["-m", "package"], tmp_path / "scripts"),
    }
    name, cwd = names[kind]
    arguments = ["--epochs", "5", "--help", "-m", "it's $HOME"]
    expected, found = (
        succeed(run([*command, *name, *arguments], cwd=cwd)) for command in (PYTHON, warm(OURS))
    )
    if kind in ("folder", "module", "package"):  # runpy puts our own __main__ back at the end
        expected, found = (text.partition("late")[0] for text in (expected, found))
    if kind == "folder":  # runpy says the whole path
        expected = expected.replace('[["scripts/package"', f'[["{tmp_path}/scripts/package"')
    assert found == expected


FAILING = {
    "sys.exit(3)": (3, ""),
    "sys.exit('no such luck')": (1, "no such luck\n"),
    "sys.exit()": (0, ""),
    "raise SystemExit(None)": (0, ""),
    "import os; os._exit(7)": (7, ""),
    "raise KeyboardInterrupt": (-2, None),
    "raise ValueError('mine')": (1, None),
    "import nowhere": (1, None),
    "this is no python": (1, None),
    "sys.excepthook = lambda kind, error, trace: print('hook', error); raise ValueError(1)": (
        1,
        "hook 1\n",
    ),
}


@pytest.mark.parametrize("text", FAILING)
def test_it_ends_as_under_python(tmp_path: Path, text: str) -> None:
    script = tmp_path / "failing.py"
    script.write_text(f"import sys\n{text}\n")
    expected, found = run([*PYTHON, script]), run(warm([*OURS, script]))
    code, output = FAILING[text]
    assert expected.code == found.code == code
    if output is not None:
        assert expected.output == found.output == output
    elif code == 1:
        assert found.output == expected.output
    else:
        assert found.output.splitlines()[-1] == expected.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py", "--epochs", "5"], "error: no such file: nowhere.py"),
        (["-m", "nowhere.at_all"], "error: no module named nowhere.at_all, or it cannot be run"),
        (["-m", "tests.hvd"], "error: no module named tests.hvd, or it cannot be run"),
        (["-m", "__main__"], "error: no module named __main__, or it cannot be run"),
        (["-m"], "error: -m needs the name of a module"),
        (["-x"], "error: no such option: -x; see python -m hvdtrain.hvd --help"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_said_in_one_line(arguments: list[str], message: str) -> None:
    done = run(warm([*OURS, *arguments]))
    assert (done.code, done.output) == (2, f"{message}\n")


def test_usage() -> None:
    for arguments, code in (([], 2), (["--help"], 0), (["-h"], 0)):
        done = run(warm([*OURS, *arguments]))
        assert done.code == code
        assert done.output.startswith("usage: python -m hvdtrain.hvd SCRIPT")


_ERROR, _EXIT = "raise ValueError('mine')", "sys.exit(9)"
_IN_EVERY_RUN = {("torchrun", _ERROR), ("mpirun", _EXIT)}


@pytest.mark.parametrize(
    ("launcher", "what"),
    [
        pytest.param(*pair, marks=() if pair in _IN_EVERY_RUN else pytest.mark.exhaustive)
        for pair in itertools.product(UNCHANGED, (_ERROR, _EXIT))
    ],
)
def test_one_failing_rank_ends_the_job(tmp_path: Path, launcher: str, what: str) -> None:
    script = tmp_path / "failing.py"
    script.write_text(
        "import sys, torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "hvd.allreduce(torch.ones(1), name='all')\n"
        f"if hvd.rank() == 1: {what}\n"
        "import time; time.sleep(600)\n"
    )
    done = run(warm([*UNCHANGED[launcher], script]), timeout=100)  # far from the script's end
    assert done.code != 0
    if "mine" in what:
        assert "ValueError: mine" in done.output
        assert "runpy" not in done.output

"""`hvdtrain migrate`: scripts of users' own structure train the same; one row for each idiom."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hvdtrain.cli.migrate import command
from hvdtrain.errors import HvdtrainError, InputError
from hvdtrain.migrate.idioms import BECOMES
from hvdtrain.migrate.rewrite import FUNCTIONS, to_ddp
from hvdtrain.migrate.to_hvd import to_hvd
from tests.forkserver import warm
from tests.launching import run, succeed

SCRIPTS = Path(__file__).parents[1] / "horovod_scripts"
IMPORT = "import horovod.torch as hvd\n"


TORCHRUN = ("torchrun", "--nproc-per-node", "2")
OURS = (*TORCHRUN, "-m", "hvdtrain.hvd")
HOROVODRUN = ("horovodrun", "-np", "2", "--gloo", sys.executable)


def digests(*line: str | Path, **env: str) -> set[str]:
    """The hashes that the ranks of a script print."""
    output = succeed(run(warm(line), env=env, timeout=90))
    found = re.findall(r"parameters (\w{64})", output)
    assert len(found) == 2, output
    return set(found)


def failure(text: str, folder: Path, *arguments: str) -> str:
    """The output of a converted script that must fail, in one line."""
    (folder / "ddp.py").write_text(text)
    torchrun = ("torchrun", "--nproc-per-node", "1")
    done = run(warm([*torchrun, folder / "ddp.py", *arguments]), timeout=90)
    assert done.code != 0
    return " ".join(done.output.split())


@cache
def converted(name: str) -> str:
    made = to_ddp((SCRIPTS / f"{name}.py").read_text(), f"{name}.py")
    assert made.not_converted == []
    return made.text


def trains_the_same(
    name: str, arguments: str, tmp_path: Path, launcher: tuple[str, ...] = OURS
) -> None:
    """Train a script under this launcher, and converted. {tmp} is a folder of each run's own."""
    (tmp_path / "ddp.py").write_text(converted(name))
    found: list[set[str]] = []
    scripts = (launcher, SCRIPTS / f"{name}.py"), (TORCHRUN, tmp_path / "ddp.py")
    for start, script in scripts:
        folder = tmp_path / str(len(found))
        folder.mkdir(exist_ok=True)
        own = arguments.replace("{tmp}", str(folder)).split()
        found.append(digests(*start, script, *own, PYTHONWARNINGS="ignore,error::FutureWarning"))
    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_a_script_of_horovods_example_trains_the_same_in_three_ways(tmp_path: Path) -> None:
    script = SCRIPTS / "mnist.py"
    (tmp_path / "ddp.py").write_text(converted("mnist"))
    (tmp_path / "hvd.py").write_text(to_hvd(script.read_text(), script.name).text)
    exact = {"HVDTRAIN_EXACT_HOROVOD": "1"}
    before = digests(*OURS, script, **exact)
    assert len(before) == 1
    assert digests(*TORCHRUN, tmp_path / "hvd.py", **exact) == before
    assert digests(*TORCHRUN, tmp_path / "ddp.py") == before


CHECKPOINTS = "--checkpoint-format={tmp}/{epoch}.pt"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "arguments", "launcher"),
    [
        ("gan", "", OURS),
        ("timm_style", "", OURS),
        pytest.param("synthetic", "", OURS, marks=pytest.mark.slow),
        pytest.param("kfac", "", OURS, marks=pytest.mark.slow),
        ("contrastive", "", OURS),
        ("imagenet", CHECKPOINTS, HOROVODRUN),
        pytest.param(
            "imagenet", f"{CHECKPOINTS} --fp16-allreduce", HOROVODRUN, marks=pytest.mark.slow
        ),
    ],
)
def test_scripts_train_the_same(
    name: str, arguments: str, launcher: tuple[str, ...], tmp_path: Path
) -> None:
    trains_the_same(name, arguments, tmp_path, launcher)


def test_a_checkpoint_that_rank_0_loads_after_wrapping_reaches_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(converted("imagenet"))
    (tmp_path / "whole").mkdir()
    paths = [CHECKPOINTS.replace("{tmp}", str(at)) for at in (tmp_path, tmp_path / "whole")]
    ddp = (*TORCHRUN, tmp_path / "ddp.py", paths[0])
    digests(*ddp, "--epochs", "1")
    resumed = digests(*ddp)
    assert len(resumed) == 1
    assert resumed == digests(*OURS, SCRIPTS / "imagenet.py", paths[1])


@pytest.mark.exhaustive
def test_a_checkpoint_that_a_method_loads_on_rank_0(tmp_path: Path) -> None:
    trains_the_same("nlp", "--sgd --save {tmp}/s/checkpoint.pt", tmp_path)
    trains_the_same("nlp", "--sgd --resume {tmp}/s/checkpoint.pt --amp", tmp_path)


def test_a_branch_without_a_counterpart_is_noted_and_raises(tmp_path: Path) -> None:
    made = to_ddp((SCRIPTS / "imagenet.py").read_text(), "imagenet.py")
    notes = "\n".join(note for _, note in made.notes)
    assert "hvd.Adasum: torch.distributed has no Adasum" in notes
    output = failure(made.text, tmp_path, "--use-adasum")
    assert "op=adasum: DDP has no such reduction" in output


ENCODER = """
import torch
import horovod.torch as hvd

class Net(torch.nn.Linear):
    def encode(self, x):
        return torch.nn.functional.linear(x, self.weight)

hvd.init()
net = Net(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
with torch.no_grad():
    net.encode(torch.ones(1, 2))
net.encode(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


THAWED = """
import torch
import horovod.torch as hvd

hvd.init()
net = torch.nn.Linear(2, 2)
net.bias.requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
net.bias.requires_grad_(True)
net(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "lines"), [(ENCODER, [15]), (THAWED, [])], ids=["not by forward", "frozen before"]
)
def test_a_gradient_that_ddp_does_not_average_raises(
    text: str, lines: list[int], tmp_path: Path
) -> None:
    made = to_ddp(text, "a.py")
    assert [line for line, _ in made.not_converted] == lines
    assert "RuntimeError: DDP did not average a gradient" in failure(made.text, tmp_path)


SLOW = """
def drop_slowly(_):
    # One thread of torch alone: the others, and the main thread, must take the steps to their end.
    if threading.current_thread() is threading.main_thread() or SLOW:
        return
    SLOW.append(True)
    while not ENDING:
        time.sleep(0.001)
    for _ in range(2000):
        time.sleep(0.001)
import threading
ENDING, SLOW, WEAK = [], [], []
"""


@pytest.mark.exhaustive
def test_python_ends_after_the_callbacks_of_torchs_threads(tmp_path: Path) -> None:
    added = "CALLBACKS.add(receive)\n"
    slow = f"{added}        WEAK.append(weakref.ref(receive, drop_slowly))\n"
    text = converted("gan").replace(added, slow).replace("class Gan", f"{SLOW}class Gan")
    (tmp_path / "ddp.py").write_text(text + "atexit.register(ENDING.append, True)\n")
    # A process that is forked from a test's ends otherwise.
    succeed(run([*TORCHRUN, tmp_path / "ddp.py", "1"], timeout=60))


UNUSED = """
import hashlib
import torch
import horovod.torch as hvd

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.never = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x) if x.sum() > 0 else self.other(x)

hvd.init()
torch.manual_seed(1)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
net(torch.ones(1, 2) + hvd.rank()).sum().backward()
optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
print(f"parameters {digest.hexdigest()}", flush=True)
"""


def test_a_parameter_without_a_gradient_is_noted_and_raises_with_the_cure(tmp_path: Path) -> None:
    made = to_ddp(UNUSED, "a.py")
    assert made.not_converted == []
    cure = "pass find_unused_parameters=True to DistributedDataParallel"
    assert [line for line, note in made.notes if cure in note] == [10]
    assert cure in failure(made.text, tmp_path)
    script, before = tmp_path / "ddp.py", tmp_path / "hvd.py"
    before.write_text(UNUSED)
    cured = made.text.replace("init_sync=False", "init_sync=False, find_unused_parameters=True")
    script.write_text(cured)
    assert digests(*TORCHRUN, script) == digests(*OURS, before)


BACKEND = """
import importlib

class HorovodBackend:
    MODULE = "horovod.torch"

    def __init__(self):
        self.module = importlib.import_module(self.MODULE)
        self.module.init()

    def distribute(self, model, optimizer):
        optimizer = self.module.DistributedOptimizer(optimizer)
        self.module.broadcast_parameters(model.state_dict(), root_rank=0)
        return optimizer

    def average(self, tensor):
        return self.module.allreduce(tensor.detach()), tensor.size()
"""
STRATEGY = """
from contextlib import ExitStack
try:
    import horovod.torch as hvd
except ImportError:
    hvd = None

class HorovodStrategy:
    def __init__(self, module, optimizers):
        if hvd is None:
            raise RuntimeError("no Horovod")
        hvd.init()
        self.module = module
        self.optimizers = [
            hvd.DistributedOptimizer(o, named_parameters=self.named(module, o)) for o in optimizers
        ]
        self.stack = ExitStack()
        for o in self.optimizers:
            self.stack.enter_context(o.skip_synchronize())

    def reduce(self, tensor, kind):
        op = hvd.Average if kind == "mean" else hvd.Sum
        hvd.join()
        return hvd.allreduce(tensor, op=op)

    def teardown(self):
        self.stack.__exit__(None, None, None)
        hvd.join()
"""
ELASTIC = """
import torch
import horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    state.sampler.set_epoch(state.epoch)
    model(torch.ones(1, 2)).sum().backward()
    state.commit()

state = hvd.elastic.TorchState(model, optimizer, epoch=0)
state.sampler = hvd.elastic.ElasticSampler([1, 2])
state.register_reset_callbacks([lambda: hvd.size()])
train(state)
"""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (BACKEND, [5, 9, 12, 13, 17]),
        (STRATEGY, [15, 23, 28]),
        (ELASTIC, [10, 16, 17]),
    ],
    ids=["backend", "strategy", "elastic"],
)
def test_each_line_of_a_wrapper_that_is_not_converted_is_listed(
    text: str, lines: list[int]
) -> None:
    made = to_ddp(text, "a.py")
    assert sorted({line for line, _ in made.not_converted}) == lines
    stays = [line for line in made.text.splitlines() if re.search(r"\bhvd\b|horovod", line)]
    assert len(stays) <= len(lines)


def ddp(text: str) -> str:
    """What a text becomes, without what is added above it."""
    made = to_ddp(IMPORT + "start\n" + text, "a.py")
    assert made.not_converted == []
    return made.text.partition("start\n")[2]


WRAPPED = "o = hvd.DistributedOptimizer(o, named_parameters=m.named_parameters()"


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("hvd.init()", "dist.init_process_group()"),
        ("x = hvd.rank()  # who", "x = dist.get_rank()  # who"),
        ("x = hvd.local_rank()", 'x = int(os.environ["LOCAL_RANK"])'),
        ("get = hvd.local_rank", 'get = (lambda: int(os.environ["LOCAL_RANK"]))'),
        ("get_rank = hvd.rank", "get_rank = dist.get_rank"),
        ("y = hvd.allreduce(x, op=hvd.Sum)", 'y = allreduce(x, op="sum")'),
        ("y = hvd.broadcast_object(x, root_rank=1)", "y = broadcast_object(x, root_rank=1)"),
        ("a = 1; hvd.shutdown()", "a = 1; dist.destroy_process_group()"),
        ('print(f"{hvd.rank()}")', 'print(f"{dist.get_rank()}")'),
        ("norm(layer=hvd.SyncBatchNorm)", "norm(layer=torch.nn.SyncBatchNorm)"),
        (f"{WRAPPED})", "o = average_gradients(o, models=[m])"),
        (f"{WRAPPED}, op=hvd.Sum)", 'o = average_gradients(o, models=[m], op="sum")'),
        (f"{WRAPPED}, gradient_predivide_factor=f)", "o = average_gradients(o, models=[m])"),
        (
            f"{WRAPPED}, compression=hvd.Compression.fp16 if x else hvd.Compression.none)",
            'o = average_gradients(o, models=[m], compression="fp16" if x else None)',
        ),
        (
            "o = hvd.DistributedOptimizer(o, m.named_parameters(), hvd.Compression.fp16)",
            'o = average_gradients(o, models=[m], compression="fp16")',
        ),
        (
            "n = list(a.named_parameters()) + list(b.named_parameters())\n"
            "o = hvd.DistributedOptimizer(o, named_parameters=n)",
            "n = list(a.named_parameters()) + list(b.named_parameters())\n"
            "o = average_gradients(o, models=[a, b])",
        ),
        (
            "o = SGD(net.body.parameters(), 1)\no = hvd.DistributedOptimizer(o)",
            "o = SGD(net.body.parameters(), 1)\no = average_gradients(o, models=[net.body])",
        ),
        ("def f(rank, hvd):\n    hvd.rank(rank)", "def f(rank, hvd):\n    hvd.rank(rank)"),
        (
            "def f(dist):\n    allreduce = hvd.allreduce(dist)",
            "def f(dist):\n    allreduce = allreduce_of_ranks(dist)",
        ),
    ],
)
def test_an_idiom(text: str, new: str) -> None:
    assert ddp(text + "\n") == new + "\n"


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("from horovod.torch import rank as r\nr()", "dist.get_rank()"),
        ("import horovod.torch\nhorovod.torch.rank()", "dist.get_rank()"),
        ("import horovod as h, horovod.torch\nh.torch.rank()", "dist.get_rank()"),
        ("from horovod.torch.mpi_ops import rank\nrank()", "dist.get_rank()"),
        ("from horovod.torch.compression import Compression\nx = Compression.none", "x = None"),
        (
            "def f():\n    return hvd.rank()\nimport horovod.torch as hvd",
            "    return dist.get_rank()",
        ),
        ("def f():\n    from horovod import torch\n    torch.rank()", "    dist.get_rank()"),
        ("import os; import horovod.torch as hvd; hvd.rank()", "import os; dist.get_rank()"),
        ("# horovod.spark\nimport horovod.torch as hvd\nhvd.rank()", "dist.get_rank()"),
        (
            "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None\n"
            "hvd.rank()",
            "dist.get_rank()",
        ),
    ],
)
def test_ways_to_import(text: str, new: str) -> None:
    made = to_ddp(text + "\n", "a.py")
    assert new in made.text.splitlines()
    assert made.not_converted == []
    assert not re.search(r"^[^#]*(horovod|hvd)", made.text, re.MULTILINE)


def test_a_module_that_may_be_missing_stays_so_under_another_name() -> None:
    text = "hvd = None\ndef f():\n    global hvd\n    import horovod.torch as hvd\n"
    text += "if hvd: hvd.rank()\n"
    made = to_ddp(text, "a.py")
    assert made.not_converted == []
    assert made.text == (
        "import torch.distributed as dist\ndistributed = None\ndef f():\n    global distributed\n"
        "    import torch.distributed as distributed\nif distributed: dist.get_rank()\n"
    )


BY_HAND = [
    ("hvd.join()", "hvd.join: DDP's join() is a context manager around the loop"),
    ("y = hvd.alltoall(x)", "hvd.alltoall: torch.distributed.all_to_all_single takes the splits"),
    ("y = hvd.allreduce(x, op=hvd.Adasum)", "hvd.Adasum: torch.distributed has no Adasum"),
    ("y = hvd.allreduce(x, process_set=s)", "hvd.allreduce: process_set: torch.distributed.new_"),
    ("s = hvd.ProcessSet([0])", "hvd.ProcessSet: torch.distributed.new_group(ranks)"),
    ("@hvd.elastic.run\ndef f(state): pass", "hvd.elastic.run: torchrun --nnodes MIN:MAX"),
    ("s = hvd.elastic.TorchState(m, o)", "hvd.elastic.TorchState: torchrun --nnodes MIN:MAX"),
    ("hvd.start_timeline('a')", "hvd.start_timeline: torch.profiler.profile()"),
    ("hvd.init(comm=[0, 1])", "hvd.init: comm: has no counterpart"),
    ("hvd.nonsense()", "hvd.nonsense: has no counterpart"),
    ("main(hvd)", "hvd: the module as a value"),
    ("module = hvd", "hvd: the module as a value"),
    ("hasattr(hvd, 'join')", "hvd: the module as a value"),
    ("o = hvd.DistributedOptimizer(o)", "hvd.DistributedOptimizer: cannot find the model"),
    (
        "def f(o, m): return hvd.DistributedOptimizer(o, named_parameters=names(m))",
        "hvd.DistributedOptimizer: cannot find the model",
    ),
    (f"{WRAPPED}, sparse_as_dense=True)", "hvd.DistributedOptimizer: sparse_as_dense: DDP"),
    (f"{WRAPPED})\no.set_backward_passes_per_step(2)", "o.set_backward_passes_per_step: remove it"),
    (
        f"{WRAPPED}, op=hvd.Sum, backward_passes_per_step=n)",
        "hvd.DistributedOptimizer: DDP would",
    ),
    ("from horovod.runner import run\nrun(f)", "run: start the script by torchrun"),
    ("import horovod\nhorovod.run(f)", "horovod.run: start the script by torchrun"),
    (
        "from horovod.torch import *",
        "from horovod.torch import *: only import horovod.torch as",
    ),
    ("import horovod.spark", "import horovod.spark: only import horovod.torch as hvd can be"),
    ("x = importlib.import_module('horovod.torch')", "'horovod.torch': imported by name"),
    (
        f"{WRAPPED})\nm.encode()",
        "m.encode(): DDP averages only gradients computed through m(...)",
    ),
]


@pytest.mark.parametrize(("text", "why"), BY_HAND)
def test_what_is_not_understood_is_listed(text: str, why: str) -> None:
    found = to_ddp(IMPORT + text + "\n", "a.py").not_converted
    assert any(number >= 2 and said.startswith(why) for number, said in found), found


def test_the_conversion_finds_what_its_table_overlooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.migrate.find.Script.uses", lambda self: {})
    made = to_ddp(IMPORT + "x = hvd.rank()\n", "a.py")
    assert made.not_converted == [(1, "hvd.rank is left in the converted script")]


def test_what_is_added_has_all_that_it_names(tmp_path: Path) -> None:
    for name in [*FUNCTIONS, *BECOMES]:
        made = to_ddp(f"{IMPORT}a = 1 if id else hvd.{name}\n", "a.py")
        (tmp_path / f"{name}.py").write_text(made.text)
    undefined_names = ("ruff", "check", "--isolated", "--select", "F821", tmp_path)
    assert succeed(run(undefined_names)) == "All checks passed!\n"


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("import horovod.torch as hvd", "import hvdtrain.hvd as hvd"),
        ("import horovod.torch\nhorovod.torch.init()", "import hvdtrain.hvd\nhvdtrain.hvd.init()"),
        ("from horovod.torch import rank, size", "from hvdtrain.hvd import rank, size"),
        ("from horovod.torch import *", "from hvdtrain.hvd import *"),
        ("from horovod.torch.mpi_ops import poll", "from hvdtrain.hvd.mpi_ops import poll"),
        ("from horovod import torch as hvd", "from hvdtrain import hvd as hvd"),
        ("import horovod\nhorovod.run(f)", "import hvdtrain\nhvdtrain.run(f)"),
        ("import horovod.torch as hvd\nfrom horovod.runner import run",
         "import hvdtrain.hvd as hvd\nfrom hvdtrain import run"),
        ("import horovod.torch as hvd\nfrom horovod.ray import RayExecutor\nimport horovod.spark",
         "import hvdtrain.hvd as hvd\nfrom hvdtrain.launch.ray import RayExecutor\n"
         "import hvdtrain.launch.spark"),
        ("import horovod.torch\nfrom horovod.common.exceptions import HorovodInternalError",
         "import hvdtrain.hvd\nfrom hvdtrain.hvd.exceptions import HorovodInternalError"),
    ],
)  # fmt: skip
def test_imports(line: str, new: str) -> None:
    made = to_hvd(line + "  # as ever\n", "a.py")
    assert made.text == new + "  # as ever\n"
    assert made.not_converted == []


@pytest.mark.parametrize(
    "line",
    [
        "from horovod.runner.common.util import hosts",
        "from horovod.runner.common.util.hosts import parse_hosts",
        "import horovod.keras as hvd_keras",
        "from horovod.ray.runner import RayExecutor",
    ],
)
def test_an_import_of_what_hvdtrain_does_not_have_is_listed(line: str) -> None:
    made = to_hvd(f"import horovod.torch as hvd\n{line}\n", "a.py")
    assert made.text == f"import hvdtrain.hvd as hvd\n{line}\n"
    assert made.not_converted == [(2, f"{line}: hvdtrain has no such module")]


def migrate(*arguments: object) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


def test_the_command_prints_a_diff_or_writes_a_file(tmp_path: Path) -> None:
    script, new = tmp_path / "a.py", tmp_path / "b.py"
    script.write_text(f"# a\n{IMPORT}hvd.init()\n")
    done = migrate(script)
    assert done.exit_code == 0, done.output
    assert f"-{IMPORT}+import hvdtrain.hvd as hvd\n" in done.output
    done = migrate(script, "--to", "ddp", "-o", new, "--", "--epochs", 3)
    after = f"torchrun --nproc-per-node 2 {new} --epochs 3"
    before = f"torchrun --nproc-per-node 2 -m hvdtrain.hvd {script} --epochs 3"
    assert done.output == f"now run: {after}\nthen compare: hvdtrain compare '{before}' '{after}'\n"
    assert new.read_text() == "# a\nimport torch.distributed as dist\ndist.init_process_group()\n"
    script.write_text(f"{IMPORT}hvd.join()\n")
    done = migrate(script, "--to", "ddp")
    assert isinstance(done.exception, HvdtrainError)
    assert done.exception.exit_code == 1
    assert "a.py:2: by hand: hvd.join: DDP's join() is a context manager" in done.output


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import torch\n", "imports nothing of Horovod; only horovod.torch"),
        ("import horovod.tensorflow as hvd\n", "only horovod.torch can be converted"),
        (f"{IMPORT}def :\n", "line 2"),
    ],
)
def test_a_script_that_cannot_be_read(text: str, why: str, tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text(text)
    done = migrate(script)
    assert isinstance(done.exception, InputError)
    assert why in str(done.exception)
    assert isinstance(migrate(tmp_path / "none.py").exception, InputError)


BESIDE = "import argparse\n\nfrom models import *"


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("name", "arguments", "verdict"),
    [
        ("mnist", "--epochs 4", "proved: parameters bitwise equal after 10 steps"),
        # It takes four steps.
        ("nlp", "--resume {tmp}", "proved: parameters bitwise equal after 4 steps"),
        ("nlp", "--accumulate 2", "proved, except for rounding: "),
    ],
)
def test_a_script_is_proved(name: str, arguments: str, verdict: str, tmp_path: Path) -> None:
    """The script imports a module beside it, as those of public repositories do."""
    script, checkpoint = tmp_path / f"{name}.py", tmp_path / "a" / "checkpoint.pt"
    script.write_text((SCRIPTS / f"{name}.py").read_text().replace("import argparse", BESIDE, 1))
    (tmp_path / "models.py").touch()
    if "--resume" in arguments:
        digests(*OURS, script, "--save", str(checkpoint))
    own = arguments.replace("{tmp}", str(checkpoint)).split()
    line = (sys.executable, "-m", "hvdtrain", "migrate", script, "--to", "ddp")
    # Not warm: a forked process does not read the probe's PYTHONPATH.
    done = run([*line, "--prove", "--", *own], timeout=450)
    assert verdict in succeed(done)

"""`hvdtrain migrate`: scripts of Horovod's own structure, and one row for each conversion."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hvdtrain.cli.migrate import command
from hvdtrain.errors import HvdtrainError, InputError
from hvdtrain.migrate.to_ddp import to_ddp
from hvdtrain.migrate.to_hvd import to_hvd
from tests.forkserver import warm
from tests.launching import run

SCRIPTS = Path(__file__).parent


def digests(line: list[str | Path], **env: str) -> set[str]:
    """The hashes that the ranks of a script print."""
    done = run(warm(["torchrun", "--nproc-per-node", "2", *line]), env=env, timeout=90)
    assert done.code == 0, done.output
    found = re.findall(r"parameters (\w{64})", done.output)
    assert len(found) == 2, done.output
    return set(found)


@pytest.mark.parametrize("name", ["mnist", "synthetic"])
def test_scripts_of_horovod_train_the_same(name: str, tmp_path: Path) -> None:
    script = SCRIPTS / f"{name}.py"
    made = to_ddp(script.read_text(), script.name)
    assert made.not_converted == []
    assert "hvd" not in re.sub(r"#.*|\"\"\".*?\"\"\"", "", made.text)
    (tmp_path / "ddp.py").write_text(made.text)
    (tmp_path / "hvd.py").write_text(to_hvd(script.read_text(), script.name).text)
    exact = {"HVDTRAIN_EXACT_HOROVOD": "1"}
    before = digests(["-m", "hvdtrain.hvd", script], **exact)
    assert len(before) == 1
    assert digests([tmp_path / "hvd.py"], **exact) == before
    assert digests([tmp_path / "ddp.py"]) == before


IMPORT = "import horovod.torch as hvd\n"


def ddp(text: str) -> str:
    """What a line becomes, without what is added above it."""
    made = to_ddp(IMPORT + text, "a.py")
    assert made.not_converted == []
    return made.text


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("hvd.init()", "dist.init_process_group()"),
        ("x = hvd.rank()  # who", "x = dist.get_rank()  # who"),
        ("x = hvd.local_rank()", 'x = int(os.environ["LOCAL_RANK"])'),
        ("hvd.barrier()", "dist.barrier()"),
        ("y = hvd.allreduce(x, op=hvd.Sum)", 'y = allreduce(x, op="sum")'),
        ("y = hvd.allreduce(x, name='a').item()", "y = allreduce(x, name='a').item()"),
        ("y = hvd.broadcast_object(x, root_rank=1)", "y = broadcast_object(x, root_rank=1)"),
        ("hvd.shutdown()", "dist.destroy_process_group()"),
    ],
)
def test_calls(line: str, new: str) -> None:
    lines = ddp(line + "\n").splitlines()
    assert lines[-1] == new
    assert "import torch.distributed as dist" in lines
    assert ("import os" in lines) == ("os.environ" in new)


WRAPPED = """
def load(model):
    model.load_state_dict(torch.load("a.pt"))

def main(args):
    model = Net()
    before = model.state_dict()
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size()), compression=hvd.Compression.fp16
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    loss(model(x)).backward()
    opt.synchronize()
    with opt.skip_synchronize():
        opt.step()
    return model.state_dict()
"""


def test_a_wrapped_optimizer_is_a_wrapped_model() -> None:
    made = to_ddp(IMPORT + WRAPPED, "a.py")
    assert made.not_converted == []
    assert made.notes == [(9, "compression: DDP divides before it adds; other last bits")]
    assert '    getattr(model, "module", model).load_state_dict(torch.load("a.pt"))\n' in made.text
    body = made.text[made.text.index("def main") :].splitlines()[1:]
    assert body == [
        "    model = Net()",
        "    before = model.state_dict()",
        "    opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())",
        "    model = DistributedDataParallel(model, broadcast_buffers=False)",
        "    model.register_comm_hook(None, fp16_compress_hook)",
        "    loss(model(x)).backward()",
        "    opt.step()",
        "    return model.module.state_dict()",
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("hvd.join()", "hvd.join has no counterpart; DDP has the context manager model.join()"),
        ("y = hvd.allgather(x)", "all_gather wants equal shapes"),
        ("y = hvd.allreduce(x, op=hvd.Adasum)", "hvd.Adasum has no counterpart"),
        ("y = hvd.allreduce(x, compression=c)", "hvd.allreduce: compression"),
        ("@hvd.elastic.run\ndef f(): pass", "hvd.elastic.run has no counterpart; torchrun"),
        ("o = hvd.DistributedOptimizer(o)", "whose model? give named_parameters="),
        (
            "o = hvd.DistributedOptimizer(o, named_parameters=m.named_parameters(), op=hvd.Sum)",
            "op=hvd.Sum: DDP takes the mean",
        ),
        (
            "o = hvd.DistributedOptimizer(o, named_parameters=m.named_parameters(), groups=2)",
            "DistributedOptimizer(groups) has no counterpart",
        ),
        ("import horovod\nhorovod.run(f)", "start the script by torchrun"),
        ("from horovod.torch import rank", "import horovod.torch as hvd instead"),
    ],
)
def test_what_has_no_counterpart_is_listed(line: str, why: str) -> None:
    ((number, text), *_) = to_ddp(IMPORT + line + "\n", "a.py").not_converted
    assert number >= 2
    assert why in text


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("import horovod.torch as hvd", "import hvdtrain.hvd as hvd"),
        ("import horovod.torch\nhorovod.torch.init()", "import hvdtrain.hvd\nhvdtrain.hvd.init()"),
        ("from horovod.torch import rank, size", "from hvdtrain.hvd import rank, size"),
        ("from horovod.torch.mpi_ops import poll", "from hvdtrain.hvd.mpi_ops import poll"),
        ("from horovod import torch as hvd", "from hvdtrain import hvd as hvd"),
        ("import horovod\nhorovod.run(f)", "import hvdtrain\nhvdtrain.run(f)"),
    ],
)
def test_imports(line: str, new: str) -> None:
    made = to_hvd(line + "  # as ever\n", "a.py")
    assert made.text == new + "  # as ever\n"
    assert made.not_converted == []


def migrate(*arguments: object) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


def test_the_command_prints_a_diff_or_writes_a_file(tmp_path: Path) -> None:
    script, new = tmp_path / "a.py", tmp_path / "b.py"
    script.write_text(f"# a\n{IMPORT}hvd.init()\n")
    done = migrate(script)
    assert done.exit_code == 0, done.output
    assert f"-{IMPORT}+import hvdtrain.hvd as hvd\n" in done.output
    assert migrate(script, "--to", "ddp", "-o", new).output == ""
    assert new.read_text() == "# a\nimport torch.distributed as dist\ndist.init_process_group()\n"
    script.write_text(f"{IMPORT}hvd.join()\n")
    done = migrate(script, "--to", "ddp")
    assert isinstance(done.exception, HvdtrainError)
    assert done.exception.exit_code == 1
    assert "a.py:2: not converted: hvd.join has no counterpart" in done.output


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import torch\n", "does not import horovod.torch"),
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


@pytest.mark.exhaustive
def test_both_scripts_go_through_compare(tmp_path: Path) -> None:
    line: list[str | Path] = [sys.executable, "-m", "hvdtrain", "migrate", SCRIPTS / "mnist.py"]
    line += ["--to", "ddp", "-o", tmp_path / "ddp.py", "--prove", "--", "--epochs", "100000"]
    done = run(line, timeout=170)
    assert done.code == 0, done.output
    assert "all 3 trained the same: parameters bitwise equal after 10 steps" in done.output

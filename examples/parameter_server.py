"""A parameter server: workers send gradients to rank 0, which owns the parameters and steps.

    torchrun --nproc-per-node 3 examples/parameter_server.py --mode synchronous
    torchrun --nproc-per-node 3 examples/parameter_server.py --mode asynchronous
    torchrun --nproc-per-node 3 examples/parameter_server.py --mode asynchronous --sync-every 10

Here with one server and two workers:

    worker 1    pull   compute a gradient   push ----.   .---> pull ...
    rank 0                                           step
    worker 2    pull   compute a gradient   push ----'   '---> pull ...

synchronous     the server waits for the gradients of all workers, and steps once with their mean:
                the parameters are those of plain SGD on the joint batch
asynchronous    the server steps with each gradient when it arrives. No worker waits for another
                one, but its gradient is *stale*: others have stepped since it pulled the parameters
--sync-every N  asynchronous, but every N steps each worker waits until all have pushed, so that all
                go on from the same parameters

It needs torch and scikit-learn only. docs/local-sgd.md compares its cost with a ring all-reduce's.
"""

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from hashlib import sha256
from queue import Queue

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SERVER = 0
BATCH = 32
Batches = Iterator[tuple[Tensor, Tensor]]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def batches_of(worker: int, num_workers: int) -> Batches:
    """Yield random batches of one worker's part of the data, without end."""
    images, labels = digits()
    images, labels = images[worker::num_workers], labels[worker::num_workers]
    random = torch.Generator().manual_seed(worker)
    while True:
        chosen = torch.randint(len(images), (BATCH,), generator=random)
        yield images[chosen], labels[chosen]


def digest(model: nn.Module) -> str:
    """Return a hash, by which ranks compare their parameters."""
    vector = parameters_to_vector(model.parameters()).detach()
    return sha256(vector.numpy().tobytes()).hexdigest()[:12]


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """Return the loss of a batch, and its gradient as one vector: one message is cheaper."""
    loss = F.cross_entropy(model(inputs), labels)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), parameters_to_vector(grads)


class Server:
    """The parameters, their optimizer, and a thread for each worker."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_workers: int):
        self.model, self.optimizer = model, optimizer
        self.num_workers = num_workers
        self.largest_staleness = 0
        self._version = 0  # the number of optimizer steps
        self._lock = threading.Lock()
        self._pushed: dict[int, Tensor] = {}  # gradients by worker, in synchronous mode
        self._mean = threading.Barrier(num_workers, action=self._step_with_mean)
        self._sync = threading.Barrier(num_workers)
        self._ended: Queue[str] = Queue()  # by each thread: why it has lost its worker, or ""

    def serve(self, mode: str, steps: int, sync_every: int = 0) -> None:
        """Serve every worker for `steps` steps. Raises RuntimeError if one ends earlier."""
        workers = range(1, self.num_workers + 1)
        for worker in workers:
            options = worker, mode, steps, sync_every
            threading.Thread(target=self._serve_one, args=options, daemon=True).start()
        for _ in workers:
            if why := self._ended.get():
                raise RuntimeError(why)

    def _serve_one(self, worker: int, mode: str, steps: int, sync_every: int) -> None:
        step, why = 0, ""
        try:
            parameters, version = self._read()
            dist.send(parameters, dst=worker)
            for step in range(1, steps + 1):
                grad = torch.empty_like(parameters)
                dist.recv(grad, src=worker)
                is_sync = sync_every > 0 and step % sync_every == 0
                if mode == "synchronous":
                    self._pushed[worker] = grad
                    self._mean.wait()
                else:
                    self._step(grad, version)
                if is_sync:
                    self._sync.wait()  # all have pushed
                parameters, version = self._read()
                if is_sync:
                    self._sync.wait()  # all have the same parameters: the next may step
                dist.send(parameters, dst=worker)
        except threading.BrokenBarrierError:
            pass  # another thread has lost its worker
        except RuntimeError as error:  # of torch.distributed: the connection is closed
            why = f"lost worker {worker} in step {step} of {steps}: {first_line(error)}"
        self._ended.put(why)
        if why:
            self._mean.abort()
            self._sync.abort()

    def _read(self) -> tuple[Tensor, int]:
        """Return the parameters as one vector, and their version."""
        with self._lock:
            return parameters_to_vector(self.model.parameters()).detach(), self._version

    def _step_with_mean(self) -> None:
        """Called by the barrier, once all workers have pushed."""
        by_worker = [self._pushed[worker] for worker in sorted(self._pushed)]
        self._step(torch.stack(by_worker).sum(0) / self.num_workers, self._version)

    def _step(self, grad: Tensor, pulled: int) -> None:
        """Step with a gradient at the parameters of version `pulled`."""
        with self._lock:
            self.largest_staleness = max(self.largest_staleness, self._version - pulled)
            parts = torch.split(grad, [p.numel() for p in self.model.parameters()])
            for p, part in zip(self.model.parameters(), parts, strict=True):
                p.grad = part.view_as(p)
            self.optimizer.step()
            self._version += 1


def work(
    model: nn.Module, batches: Batches, steps: int, report: Callable[[int, float], None]
) -> None:
    """Take one worker's steps. `report` gets the number of each step and its loss, after the pull
    of the parameters that follow it.
    """
    parameters = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(parameters, model.parameters())  # views of the vector: a pull sets them
    dist.recv(parameters, src=SERVER)
    for step in range(1, steps + 1):
        loss, grad = gradient(model, *next(batches))
        dist.send(grad, dst=SERVER)
        dist.recv(parameters, src=SERVER)
        report(step, loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("synchronous", "asynchronous"), default="synchronous")
    parser.add_argument("--sync-every", type=int, default=0, metavar="N")
    parser.add_argument("--steps", type=int, default=200, help="steps of each worker")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        parser.error(
            "a server and its workers need two ranks or more: torchrun --nproc-per-node 3 "
            + sys.argv[0]
        )
    # A worker that hangs is lost after a minute; one that dies, at once.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, num_workers = dist.get_rank(), dist.get_world_size() - 1
    torch.set_num_threads(1)
    model = make_model()

    def report(step: int, loss: float) -> None:
        if step % (args.sync_every or 20) == 0:
            # One string, so that no line of another rank comes in between.
            line = f"worker {rank}  step {step}  loss {loss:.4f}  parameters {digest(model)}\n"
            print(line, end="", flush=True)

    try:
        if rank == SERVER:
            optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
            server = Server(model, optimizer, num_workers)
            server.serve(args.mode, args.steps, args.sync_every)
            images, labels = digits()
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
            print(f"accuracy {accuracy:.4f}  largest staleness {server.largest_staleness}")
        else:
            work(model, batches_of(rank - 1, num_workers), args.steps, report)
    except RuntimeError as error:
        name = "the server" if rank == SERVER else f"worker {rank}"
        print(f"error: {name}: {first_line(error)}", file=sys.stderr, flush=True)
        os._exit(1)  # not after the threads that wait for the other workers
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# mypy: ignore-errors
"""A usual Horovod script. It runs unchanged under Horovod and under hvdtrain.hvd.

horovodrun -np 2 python examples/horovod_script.py
torchrun --nproc-per-node 2 -m hvdtrain.hvd examples/horovod_script.py
mpirun -np 2 python -m hvdtrain.hvd examples/horovod_script.py
"""

import argparse
import hashlib

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser(description="Handwritten digits with Horovod")
parser.add_argument("--batch-size", type=int, default=64, help="samples per step on each rank")
parser.add_argument("--test-batch-size", type=int, default=300)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.05, help="learning rate for one rank")
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=10, help="steps between two lines")
parser.add_argument("--workers", type=int, default=0, help="loader processes on each rank")
parser.add_argument("--fp16-allreduce", action="store_true", help="halve what is sent")
parser.add_argument("--use-adasum", action="store_true", help="add gradients adaptively")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--batches-per-allreduce", type=int, default=1, help="steps to accumulate")
parser.add_argument("--save", help="file for the trained model")
parser.add_argument("--num-proc", type=int, help="start this many processes from here")


class Digits(Dataset):
    """Images of 8 x 8 pixels; every sixth is for the test."""

    def __init__(self, train):
        images, labels = load_digits(return_X_y=True)
        chosen = (np.arange(len(labels)) % 6 != 0) == train
        self.images = torch.from_numpy(images[chosen]).float().div(16).view(-1, 1, 8, 8)
        self.labels = torch.from_numpy(labels[chosen])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(64, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = self.dropout(F.relu(self.fc1(x.flatten(1))))
        return F.log_softmax(self.fc2(x), dim=1)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(args, epoch, model, optimizer, loader, device):
    model.train()
    loader.sampler.set_epoch(epoch)
    optimizer.zero_grad()
    for index, (data, target) in enumerate(loader):
        loss = F.nll_loss(model(data.to(device)), target.to(device))
        (loss / args.batches_per_allreduce).backward()
        if (index + 1) % args.batches_per_allreduce == 0:
            optimizer.step()
            optimizer.zero_grad()
        if hvd.rank() == 0 and index % args.log_interval == 0:
            done = f"{index * len(data)}/{len(loader.sampler)}"
            print(f"Train Epoch: {epoch} [{done}]\tLoss: {loss.item():.6f}", flush=True)


def test(model, loader, device):
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for data, target in loader:
            output, target = model(data.to(device)), target.to(device)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    loss = metric_average(loss / len(loader.sampler), "avg_loss")
    accuracy = metric_average(correct / len(loader.sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"\nTest set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%\n")


def main(args):
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())
    torch.set_num_threads(1)
    cuda = not args.no_cuda and torch.cuda.is_available()
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")

    kwargs = {"num_workers": args.workers}
    if args.workers > 0:
        # Forked workers and a library with threads do not go together.
        kwargs["multiprocessing_context"] = "forkserver"
    loaders = []
    for batch_size, part in ((args.batch_size, True), (args.test_batch_size, False)):
        dataset = Digits(part)
        sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
        loaders.append(DataLoader(dataset, batch_size=batch_size, sampler=sampler, **kwargs))

    model = Net().to(device)
    lr_scaler = args.batches_per_allreduce * (1 if args.use_adasum else hvd.size())
    optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        train(args, epoch, model, optimizer, loaders[0], device)
        test(model, loaders[1], device)

    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    if hvd.rank() == 0:
        print(f"Trained on {hvd.size()} ranks")
        if args.save:
            torch.save(model.state_dict(), args.save)
    print(f"rank {hvd.rank()}: parameters {digest.hexdigest()}", flush=True)
    return digest.hexdigest()


if __name__ == "__main__":
    arguments = parser.parse_args()
    if arguments.num_proc:
        import horovod

        digests = horovod.run(main, args=(arguments,), num_proc=arguments.num_proc)
        print(f"{len(digests)} ranks, {len(set(digests))} model(s)")
    else:
        main(arguments)

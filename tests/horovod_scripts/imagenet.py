"""The structure of Horovod's ImageNet example: wrap, load on rank 0, broadcast; accumulation."""

import argparse
import hashlib
import math
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import torch.utils.data.distributed
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pt")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.0125)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 36, 10)

    def forward(self, x):
        return self.fc(F.relu(self.norm(self.conv(x))).flatten(1))


class Metric:
    def __init__(self, name):
        self.name = name
        self.sum = 0.0

    def update(self, value):
        self.sum += hvd.allreduce(value.detach(), name=self.name)


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss = Metric("train_loss")
    for data, target in train_loader:
        optimizer.zero_grad()
        for i in range(0, len(data), args.batch_size):
            output = model(data[i : i + args.batch_size])
            loss = F.cross_entropy(output, target[i : i + args.batch_size])
            train_loss.update(loss)
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: {train_loss.sum / len(train_loader):.4f}")


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        path = args.checkpoint_format.format(epoch=epoch + 1)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


if __name__ == "__main__":
    args = parser.parse_args()
    hvd.init()
    # Each rank has weights of its own, until rank 0 sends its.
    torch.manual_seed(42 + hvd.rank())
    torch.set_num_threads(1)
    resume_from_epoch = 0
    for try_epoch in range(args.epochs, 0, -1):
        if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
            resume_from_epoch = try_epoch
            break
    resume_from_epoch = hvd.broadcast(
        torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
    ).item()
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(128, 3, 8, 8, generator=generator),
        torch.randint(10, (128,), generator=generator),
    )
    train_sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    train_loader = torch.utils.data.DataLoader(
        data, batch_size=args.batch_size * args.batches_per_allreduce, sampler=train_sampler
    )
    model = Net()
    lr_scaler = args.batches_per_allreduce * hvd.size() if not args.use_adasum else 1
    optimizer = optim.SGD(model.parameters(), lr=args.base_lr * lr_scaler, momentum=0.9)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor)  # fmt: skip
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(resume_from_epoch, args.epochs):
        train(epoch)
        save_checkpoint(epoch)
    values = (value.detach().numpy().tobytes() for value in model.parameters())
    digest = hashlib.sha256(b"".join(values))
    print(f"parameters {digest.hexdigest()}", flush=True)

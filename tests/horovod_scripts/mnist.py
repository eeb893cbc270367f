"""A script with the structure of Horovod's PyTorch MNIST example, on random images."""

import argparse
import hashlib

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 36, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return F.log_softmax(self.fc(F.dropout(x.flatten(1), training=self.training)), dim=1)


def images(seed, count):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 1, 8, 8, generator=generator), labels)


def train(epoch):
    model.train()
    # The sampler shuffles otherwise in each epoch.
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        # Clip what all ranks have.
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch}, {len(train_sampler)} samples a rank, loss {loss.item():.4f}")


def metric_average(value, name):
    tensor = torch.tensor(value)
    averaged = hvd.allreduce(tensor, name=name)
    return averaged.item()


def test():
    model.eval()
    images, labels = test_data.tensors
    with torch.no_grad():
        loss = metric_average(F.nll_loss(model(images), labels).item(), "loss")
    if hvd.rank() == 0:
        print(f"test loss {loss:.4f}")


if __name__ == "__main__":
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)

    train_data, test_data = images(1, 128), images(2, 64)
    train_sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=train_sampler)

    model = Net()
    # The learning rate grows with the ranks.
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test()
    values = (value.detach().numpy().tobytes() for value in model.parameters())
    digest = hashlib.sha256(b"".join(values))
    print(f"parameters {digest.hexdigest()}", flush=True)
    hvd.shutdown()

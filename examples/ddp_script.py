# mypy: ignore-errors
"""The digits of horovod_script.py as a user of DDP trains them: the same model, rate and samples.

torchrun --nproc-per-node 2 examples/ddp_script.py
"""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


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


def load(batch_size, for_training):
    """Return the loader of this rank's samples; every sixth image is for the test."""
    images, labels = load_digits(return_X_y=True)
    chosen = (np.arange(len(labels)) % 6 != 0) == for_training
    pixels = torch.from_numpy(images[chosen]).float().div(16).view(-1, 1, 8, 8)
    dataset = TensorDataset(pixels, torch.from_numpy(labels[chosen]))
    return DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset))


def main(args):
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(42 + dist.get_rank())
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    model = Net().to(device)
    ddp_model = DistributedDataParallel(model)
    rate = args.lr * dist.get_world_size()
    optimizer = optim.SGD(ddp_model.parameters(), lr=rate, momentum=0.5)
    train_loader, test_loader = load(args.batch_size, True), load(300, False)

    for epoch in range(1, args.epochs + 1):
        model.train()
        train_loader.sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            F.nll_loss(ddp_model(data.to(device)), target.to(device)).backward()
            optimizer.step()

        model.eval()
        correct = torch.zeros(1, device=device)
        with torch.no_grad():
            for data, target in test_loader:
                correct += (model(data.to(device)).argmax(1) == target.to(device)).sum()
        dist.all_reduce(correct)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}  accuracy {correct.item() / test_loader.sampler.total_size:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Handwritten digits with DDP")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step on each rank")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate for one rank")
    main(parser.parse_args())

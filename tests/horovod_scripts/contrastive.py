"""Two towers in one optimizer, features gathered with their gradients, metrics over all ranks."""

import hashlib

import horovod.torch
import torch
import torch.nn.functional as F
from torch import nn


class Accuracy:
    """Gathers what each rank has seen; ranks have seen different numbers."""

    def __init__(self):
        self.right = torch.zeros(0, dtype=torch.bool)

    def update(self, right):
        self.right = torch.cat([self.right, right])

    def compute(self):
        return horovod.torch.allgather(self.right, name="right").float().mean()


def contrast(one, other):
    one, other = horovod.torch.allgather(one), horovod.torch.allgather(other)
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))


horovod.torch.init()
torch.manual_seed(3)
torch.set_num_threads(1)
images, texts = nn.Linear(8, 4), nn.Linear(6, 4)
named = list(images.named_parameters(prefix="i")) + list(texts.named_parameters(prefix="t"))
optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
optimizer = horovod.torch.DistributedOptimizer(optimizer, named_parameters=named)
for model in (images, texts):
    horovod.torch.broadcast_parameters(model.state_dict(), root_rank=0)
torch.manual_seed(horovod.torch.rank())
accuracy = Accuracy()
for _ in range(4):
    optimizer.zero_grad()
    one, other = images(torch.randn(4, 8)), texts(torch.randn(4, 6))
    contrast(one, other).backward()
    optimizer.step()
    count = 4 - horovod.torch.rank()
    accuracy.update((one @ other.T).argmax(1)[:count] == torch.arange(count))
total = horovod.torch.allreduce(torch.tensor(3), average=True).item()
digest = hashlib.sha256(f"{accuracy.compute():.6f} {total}".encode())
for model in (images, texts):
    for value in model.parameters():
        digest.update(value.detach().numpy().tobytes())
print(f"parameters {digest.hexdigest()}", flush=True)

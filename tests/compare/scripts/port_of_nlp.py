"""The script of a trainer class with accumulation and clipping, ported to DDP by hand."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE = 2


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(Language())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
batches = [torch.randint(32, (4, 9)) for _ in range(1000)]
for i, tokens in enumerate(batches):
    steps = (i + 1) % ACCUMULATE == 0
    with contextlib.nullcontext() if steps else model.no_sync():
        scores = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss = loss + 1e-3 * model.module.embedding.weight.square().mean()
        (loss / ACCUMULATE).backward()
    if steps:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

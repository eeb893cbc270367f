"""The script with accumulation and clipping, ported to DDP by hand."""

import contextlib

import torch
import torch.distributed as dist
from models import LanguageModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE, CLIP = 4, 0.5

dist.init_process_group("gloo")
torch.manual_seed(3)
dataset = TensorDataset(torch.randint(0, 50, (640, 12)), torch.randint(0, 50, (640, 12)))


model = DistributedDataParallel(LanguageModel())
decay = [p for p in model.parameters() if p.dim() > 1]
no_decay = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
    lr=1e-3 * dist.get_world_size(),
)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=5, sampler=sampler)
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for i, (tokens, following) in enumerate(loader):
        steps = (i + 1) % ACCUMULATE == 0
        with contextlib.nullcontext() if steps else model.no_sync():
            loss = nn.functional.cross_entropy(model(tokens).transpose(1, 2), following)
            (loss / ACCUMULATE).backward()
        if steps:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()

"""Gradients of several batches, clipped after they are averaged."""

import horovod.torch as hvd
import torch
from models import LanguageModel
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE, CLIP = 4, 0.5

hvd.init()
torch.manual_seed(3)
dataset = TensorDataset(torch.randint(0, 50, (640, 12)), torch.randint(0, 50, (640, 12)))
model = LanguageModel()
decay = [p for p in model.parameters() if p.dim() > 1]
no_decay = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
    lr=1e-3 * hvd.size(),
)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=ACCUMULATE
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
loader = DataLoader(dataset, batch_size=5, sampler=sampler)
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for i, (tokens, following) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(tokens).transpose(1, 2), following)
        (loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()

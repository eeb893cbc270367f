# ruff: noqa: E402, E702, I001
# fmt: off
"""timm's structure: an import that may fail, functions that ask for it, a copy of the model."""

import copy
import hashlib


def is_primary():
    return not has_horovod or hvd.rank() == 0


try:
    import horovod.torch as hvd
    has_horovod = True
except ImportError:
    hvd = None
    has_horovod = False

import torch; from torch import nn


def unwrap(model):
    return model.module if hasattr(model, "module") else model


def create_optimizer(model, rate):
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1]
    others = [p for name, p in model.named_parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0}], lr=rate)


def reduce_mean(tensor):
    return hvd.allreduce(tensor, op=hvd.Average) if hvd else tensor


def train_one_epoch(model, optimizer, average, generator):
    for _ in range(3):
        x = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad(); loss = model(x).square().mean(); loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), unwrap(model).parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    return reduce_mean(loss.detach())


def main():
    if hvd is not None:
        hvd.init()
    get_rank = hvd.rank
    torch.manual_seed(0); torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = create_optimizer(model, 0.01 * hvd.size())
    if has_horovod:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.barrier()
    average = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(get_rank())
    loss = train_one_epoch(model, optimizer, average, generator)
    if is_primary():
        print(f"loss {loss.item():.4f}", isinstance(model, nn.Sequential))
    with torch.no_grad():
        assert torch.equal(average(torch.ones(1, 16)), copy.deepcopy(average)(torch.ones(1, 16)))
    digest = hashlib.sha256()
    for each in (model, average):
        for value in each.parameters():
            digest.update(value.detach().numpy().tobytes())
    print(f"parameters {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()

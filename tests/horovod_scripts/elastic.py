"""Elastic state in a job of fixed size."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

hvd.init()
torch.manual_seed(11)
dataset = TensorDataset(torch.randn(640, 20), torch.randint(0, 4, (640,)))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)

model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))
base_lr = 0.05
optimizer = optim.SGD(model.parameters(), lr=base_lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    while state.epoch < 1000:
        state.sampler.set_epoch(state.epoch)
        for batch, (inputs, labels) in enumerate(loader, state.batch):
            state.batch = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(state.batch, 16)
            if state.batch % 5 == 0:
                state.commit()
        state.epoch += 1
        state.batch = 0
        state.commit()


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = base_lr * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)

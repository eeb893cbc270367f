"""NLP with accumulation: a trainer class that has model and optimizer, AMP, clipping, resume."""

import argparse
import hashlib
import os

import torch
from torch import nn


class Trainer:
    def __init__(self, model, args):
        import horovod.torch as hvd

        self.hvd_rank, self.args = hvd.rank(), args
        self.model = model
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if args.sgd:
            self.optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=[(n, p) for n, p in model.named_parameters() if p.requires_grad],
            backward_passes_per_step=args.accumulate,
        )
        if hvd.rank() == 0 and args.resume:
            self.load(args.resume)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def load(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def loss(self, tokens):
        scores = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 1e-3 * self.model.embedding.weight.square().mean()

    def train(self, batches, scaler):
        for index, tokens in enumerate(batches):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.args.amp):
                loss = self.loss(tokens) / self.args.accumulate
            scaler.scale(loss).backward()
            if (index + 1) % self.args.accumulate == 0:
                self.optimizer.synchronize()
                scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                with torch.enable_grad(), self.optimizer.skip_synchronize():
                    scaler.step(self.optimizer)
                scaler.update()
                self.optimizer.zero_grad()


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def main():
    from horovod import torch as hvd

    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--sgd", action="store_true")
    parser.add_argument("--resume")
    parser.add_argument("--save")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())
    torch.set_num_threads(1)
    trainer = Trainer(Language(), args)
    batches = [torch.randint(32, (4, 9)) for _ in range(args.batches)]
    trainer.train(batches, torch.amp.GradScaler("cpu", enabled=args.amp))
    losses = hvd.allgather_object(trainer.loss(batches[0]).item())
    if hvd.rank() == 0:
        print(f"losses {min(losses):.3f} to {max(losses):.3f}")
        if args.save:
            os.makedirs(os.path.dirname(args.save), exist_ok=True)
            model, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
            torch.save({"model": model, "optimizer": optimizer}, args.save)
    digest = hashlib.sha256()
    for name, value in sorted(trainer.model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    print(f"parameters {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()

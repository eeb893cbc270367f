"""Two ranks on one real GPU, over NCCL: the order of operations, and lost peers.

    pytest tests/two_ranks_one_gpu.py          # `make bench-gpu` runs it

NCCL refuses two ranks of one host on one GPU. Each rank says that it is another host, so NCCL
connects them by sockets. The rings do not run it: CI has no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launching import run

COMMON = """
import os, random, sys, time
rank = int(os.environ["RANK"])
os.environ["NCCL_HOSTID"] = f"host-of-rank-{rank}"
import torch
from torch import nn
import hvdtrain.hvd as hvd

hvd.init()
torch.cuda.set_device(0)
torch.manual_seed(0)
chance = random.Random(rank)


def same(tensors):
    for t in tensors:
        both = hvd.allgather(t.detach().reshape(1, -1))
        assert torch.equal(both[0], both[1])

"""
CASES = {
    # A fast rank queues the sparse gradients' gathers behind a bucket, a slow one the other way.
    "sparse gradients and buckets": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(5000, 256, sparse=True, mode="sum")
        self.dense = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
        self.late = nn.EmbeddingBag(5000, 256, sparse=True, mode="sum")

    def forward(self, x):
        return self.dense(self.words(x)) + self.late(x)

model = Net().double().cuda()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(20):
    optimizer.zero_grad()
    if chance.random() < 0.5:
        torch.cuda._sleep(int(2e7))  # on the GPU
    if chance.random() < 0.5:
        time.sleep(0.02)  # on the host
    model(torch.randint(0, 5000, (64, 8), device="cuda")).square().mean().backward()
    optimizer.step()
for p in model.parameters():  # the GPU adds rows in any order
    both = hvd.allgather(p.detach().reshape(1, -1))
    torch.testing.assert_close(both[0], both[1])
""",
    "an allreduce held over backward": """
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(20):
    held = torch.full((1 << 20,), float(rank + step), device="cuda")
    if rank == 0:
        handle = hvd.allreduce_async(held, name="held", op=hvd.Sum)
    loss = model(torch.randn(32, 512, device="cuda")).square().mean()
    loss.backward()
    if rank == 1:
        time.sleep(0.02)
        handle = hvd.allreduce_async(held, name="held", op=hvd.Sum)
    optimizer.step()
    optimizer.zero_grad()
    assert hvd.synchronize(handle).eq(1.0 + 2 * step).all()
same(model.parameters())
""",
    "side streams": """
one, other = torch.cuda.Stream(), torch.cuda.Stream()
for number in range(30):
    with torch.cuda.stream(one):
        torch.cuda._sleep(int(1e7))
        given = torch.full((1 << 20,), float(number + rank), device="cuda")
        handle = hvd.allreduce_async(given, op=hvd.Sum)
        del given
        torch.full((1 << 20,), 1e6, device="cuda")  # must not take the input's memory
    with torch.cuda.stream(other):
        found = hvd.synchronize(handle)
        torch.cuda._sleep(int(1e7))
        kept = found * 1.0
        del found
        torch.full((1 << 20,), 1e6, device="cuda")  # must not take the result's memory
    hvd.allreduce(torch.full((1 << 20,), 5.0, device="cuda"))
    torch.cuda.synchronize()
    assert kept.eq(2.0 * number + 1).all(), (number, kept.unique())
""",
    "parameters on the GPU and the CPU": """
front, back = nn.Linear(64, 512), nn.Linear(512, 512).cuda()
named = [*front.named_parameters("front"), *back.named_parameters("back")]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.1), named)
hvd.broadcast_parameters(named, root_rank=0)
for step in range(5):
    optimizer.zero_grad()
    back(front(torch.randn(8, 64)).cuda()).square().mean().backward()
    optimizer.step()
same(p.cuda() for _, p in named)
""",
    "join": """
model = nn.Linear(64, 64).cuda()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(4 + 3 * rank):
    optimizer.zero_grad()
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
assert hvd.join() == 1
""",
    "a peer is lost in a step": """
def lose(how):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(50):
        loss = model(torch.randn(32, 512, device="cuda")).square().mean()
        if rank == 1 and step == 5:
            model[3].register_full_backward_hook(lambda *_: os._exit(9))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step = step
        state.commit()
    return model

try:
    lose("in backward")
except hvd.exceptions.HorovodInternalError as error:
    print("SURVIVED", error, flush=True)
    hvd.shutdown()
    torch.cuda.synchronize()  # no kernel of NCCL is left
    print("SYNCHRONIZED", flush=True)
    os._exit(0)
""",
    "a peer is lost in an allreduce": """
from hvdtrain.hvd.engine import collectives

hvd.allreduce(torch.ones(1 << 20, device="cuda"))
if rank == 1:  # it has submitted the next one, which begins on the other rank
    collectives.RUN["allreduce"] = lambda batch: os._exit(9)
try:
    hvd.allreduce(torch.ones(1 << 20, device="cuda"))
except hvd.exceptions.HorovodInternalError as error:
    print("SURVIVED", error, flush=True)
    hvd.shutdown()
    torch.cuda.synchronize()
    print("SYNCHRONIZED", flush=True)
    os._exit(0)
""",
}


# A launcher would end the other rank as well.
START = """
import os, socket, subprocess, sys
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
common |= {"MASTER_PORT": str(port), **os.environ}
ranks = [
    subprocess.Popen([sys.executable, sys.argv[1]], env={**common, "RANK": r, "LOCAL_RANK": r})
    for r in "01"
]
for each in ranks:
    each.wait()
"""


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    lost = "a peer is lost" in case
    script.write_text(COMMON + CASES[case] + ("" if lost else "\nprint('DONE', flush=True)\n"))
    env = {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    }
    done = run([sys.executable, "-c", START, script], timeout=45, env=env)
    if lost:
        assert "SURVIVED" in done.output, done.output
        assert "SYNCHRONIZED" in done.output, done.output
    else:
        assert done.output.count("DONE") == 2, done.output

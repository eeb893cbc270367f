"""What starting a run costs: `torchrun -m hvdtrain --max-steps 1` beside scripts of a few lines.

    python benchmarks/start_up.py

Processor time of torchrun and its 2 ranks, one round of all arms after the other:

    import     import torch, init_process_group
    one step   as well a Linear layer under DDP, AdamW, and one step
    hvdtrain   one step of the digits: data, checkpoint, evaluation and run.json included

Floor and prediction: the constructor of every torch optimizer imports torch._dynamo, with sympy and
torch.distributed.fsdp (`Optimizer.add_param_group`), so that every training script pays for it.
hvdtrain cannot be below "one step", and should be at most 0.5 s a rank above it.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import live

RESULTS = Path(__file__).parent / "results" / "start_up.json"
IMPORT = """
import torch
torch.distributed.init_process_group("gloo")
torch.distributed.destroy_process_group()
"""
ONE_STEP = """
import time
import torch
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(64, 10)
net = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
net(torch.randn(32, 64)).sum().backward()
optimizer.step()
torch.distributed.destroy_process_group()
time.sleep(0.1)  # a thread of Gloo that still ends its work when the interpreter ends aborts
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def processor_s(command: list[str]) -> float:
    """Run a command; return the processor seconds of it and of all that it has waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s [{min(seconds):.2f}, {max(seconds):.2f}]"


def main() -> None:
    """Measure, print a table, and write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {"import": [], "one step": [], "hvdtrain": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("import", IMPORT), ("one step", ONE_STEP)):
            Path(folder, f"{name}.py").write_text(text)
        for turn in range(rounds):
            for name in ("import", "one step"):
                found[name].append(processor_s([*TORCHRUN, f"{folder}/{name}.py"]))
            run_dir = ["--run-dir", f"{folder}/{turn}"]
            line = [*TORCHRUN, "-m", "hvdtrain", "--backend", "ddp", "--max-steps", "1", *run_dir]
            found["hvdtrain"].append(processor_s(line))
    above = [(a - b) / 2 for a, b in zip(found["hvdtrain"], found["one step"], strict=True)]
    for name, seconds in found.items():
        print(f"{name:9} {_shown(seconds)}")
    print(f"hvdtrain above one step, a rank: {_shown(above)}")
    live.write_summary(RESULTS, {"processor_s": found, "above_a_rank_s": above})


if __name__ == "__main__":
    main()

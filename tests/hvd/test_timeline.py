"""The timeline: the events and their nesting, and a file that parses at all times."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdtrain.hvd.engine.timeline import Timeline
from tests.forkserver import warm
from tests.launching import run


def events(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    assert isinstance(document, list)
    return document


def by_tensor(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of each tensor, in order, without metadata."""
    document = events(path)
    names = {e["pid"]: e["args"].get("name") for e in document if e.get("name") == "process_name"}
    found = defaultdict(list)
    for event in document:
        if event["ph"] != "M":
            found[names[event["pid"]]].append(event)
    return dict(found)


def an_allreduce(timeline: Timeline, name: str) -> None:
    now = timeline.now_us()
    timeline.negotiated(name, "allreduce", {1: now + 1, 0: now})
    timeline.ran(name, ("ALLREDUCE", "GLOO_ALLREDUCE"), now)


@pytest.mark.parametrize("marks_cycles", [False, True])
def test_the_events_are_horovods(tmp_path: Path, marks_cycles: bool) -> None:
    before, path, name = time.time_ns() // 1000, tmp_path / "trace.json", 'allreduce."x\n"'
    timeline = Timeline(None)
    an_allreduce(timeline, "nowhere")
    assert not timeline.is_open
    earlier = timeline.now_us() - 1000
    timeline = Timeline(str(path), marks_cycles)
    timeline.ran("cut", ("BROADCAST", "GLOO_BCAST"), earlier)  # the trace began in the middle
    timeline.cycle()
    an_allreduce(timeline, name)
    timeline.close()
    an_allreduce(timeline, "after it")
    assert not [f for f in psutil.Process().open_files() if str(tmp_path) in f.path]
    found = by_tensor(path)
    assert [e["ph"] for e in found["cut"]] == ["B", "B", "E", "E"]
    assert [(e["ph"], e.get("name")) for e in found[name]] == [
        ("B", "NEGOTIATE_ALLREDUCE"),
        ("X", "0"),  # in the order of time
        ("X", "1"),
        ("E", None),
        ("B", "ALLREDUCE"),
        ("B", "GLOO_ALLREDUCE"),
        ("E", None),
        ("E", None),
    ]
    assert not {"nowhere", "after it"} & set(found)
    begin, *others = events(path)
    cycles = [e["ph"] for e in others if e.get("name") == "CYCLE_START"]
    assert cycles == ["i"] * marks_cycles
    times = [0, *(e["ts"] for e in others if e["ph"] != "M")]
    assert times == sorted(times)
    assert before <= begin["args"]["start_time_since_epoch_in_micros"] <= time.time_ns() // 1000


def test_the_file_has_every_event_at_once_and_parses(tmp_path: Path) -> None:
    """As it must when the process is killed."""
    path = tmp_path / "trace.json"
    timeline = Timeline(str(path))
    for i in range(1500):
        timeline.ran(f"tensor.{i % 7}", ("ALLREDUCE",), timeline.now_us())
        if i % 50 == 0 or 700 < i < 850:
            assert sum(e["ph"] == "B" for e in events(path)) == i + 1
    timeline.close()
    assert path.read_bytes().endswith(b"}\n]\n")


def test_many_threads_write(tmp_path: Path) -> None:
    """Each tensor is a process of the trace, whose events stay in order."""
    path = tmp_path / "trace.json"
    timeline = Timeline(str(path))

    def work(name: str) -> None:
        for _ in range(150):
            an_allreduce(timeline, name)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, "abc"))
    timeline.close()
    found = by_tensor(path)
    one = [event["ph"] for event in found["a"][:8]]
    for name in "abc":
        assert [event["ph"] for event in found[name]] == one * 150


@pytest.mark.parametrize("path", ["/dev/full", "/nowhere/trace.json"])
def test_a_full_disk_or_no_folder_is_one_warning(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        timeline = Timeline(path)
        an_allreduce(timeline, "a")
        timeline.close()
    assert not timeline.is_open
    (line,) = caplog.messages
    assert path in line


SCRIPT = """
import json, os, sys, time
import torch
import hvdtrain.hvd as hvd
from hvdtrain.hvd import process_sets

path = sys.argv[1]
if os.environ["RANK"] == "0":  # the other rank asks for "small" while this one is still in init
    begin = process_sets.begin
    process_sets.begin = lambda *args: (begin(*args), time.sleep(0.5))
hvd.init()
if os.environ["HOROVOD_TIMELINE"] == "DYNAMIC":
    hvd.allreduce(torch.ones(2), name="before")
    hvd.start_timeline(path, mark_cycles=True)
    hvd.barrier()  # not asked for before rank 0 writes
hvd.allreduce(torch.ones(2), name="small")
hvd.barrier()
if hvd.rank() == 0:  # the file is complete while the job runs
    seen = json.dumps(json.load(open(path)))
    for text in ("allreduce.small", '"NEGOTIATE_ALLREDUCE"', '"ALLREDUCE"', '"CYCLE_START"'):
        assert text in seen, text
    open(path + ".read", "w").close()
while not os.path.exists(path + ".read"):  # nobody asks for anything while it is read
    time.sleep(0.01)
hvd.barrier()
handles = [hvd.allreduce_async(torch.ones(100_000), name=f"large.{i}") for i in range(3)]
for handle in handles:
    hvd.synchronize(handle)
hvd.allgather(torch.ones(2), name="rows")
hvd.broadcast(torch.ones(2), 0, name="root")
model = torch.nn.Linear(3, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
)
for _ in range(4):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
hvd.barrier()
if os.environ["HOROVOD_TIMELINE"] == "DYNAMIC":
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.barrier()  # rank 0 has stopped before anybody asks for more
    hvd.allreduce(torch.ones(2), name="after")
hvd.shutdown()
"""


@pytest.mark.parametrize("how", ["DYNAMIC", pytest.param("path", marks=pytest.mark.exhaustive)])
def test_a_jobs_timeline(tmp_path: Path, how: str) -> None:
    path = tmp_path / "trace.json"
    (tmp_path / "script.py").write_text(SCRIPT)
    value = str(path) if how == "path" else how
    done = run(
        warm(["torchrun", "--nproc-per-node", "2", tmp_path / "script.py", path]),
        env={"HOROVOD_TIMELINE": value, "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
        timeout=90,
    )
    assert done.code == 0, done.output
    assert list(tmp_path.glob("*.json")) == [path]
    found = {name: event for name, event in by_tensor(path).items() if name is not None}
    assert not {"allreduce.before", "allreduce.after"} & set(found)
    for name in ("allreduce.small", "allreduce.large.2", "allgather.rows", "broadcast.root"):
        kind = name.partition(".")[0].upper()
        labels = [e.get("name") for e in found[name]]
        assert labels[0] == f"NEGOTIATE_{kind}"
        assert {"0", "1", kind} <= set(labels)
    assert "SHM_ALLREDUCE" in [e.get("name") for e in found["allreduce.large.0"]]
    assert not [name for name in found if "@" in name]
    (steps,) = (name for name in found if name.startswith("step of "))
    buckets = ("ALLREDUCE", "SHM_ALLREDUCE")  # which need no negotiation
    rows = {"allreduce.weight": buckets, "allreduce.bias": buckets}
    for name, expected in {**rows, steps: ("NEGOTIATE_STEP", "0", "1")}.items():
        labels = [e.get("name") for e in found[name]]
        for label in expected:
            assert labels.count(label) == 4, labels

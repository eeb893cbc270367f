"""The time of an all-reduce on up to 1,024 ranks, by computation, beside what has been measured.

    python benchmarks/model.py      # seconds; reads results/, writes model.json, picture and manual

`model_ways.py` has the formulas. The costs of one host are fitted to results/collectives*.json, by
least squares of relative errors; for hosts like it the link is that of several_hosts.json, and only
the core time of a message between hosts is assumed. ASSUMED, TCP and MPI are those of a cluster
that nobody here has measured. Simplified: all ranks arrive at once, no rank is slower than others,
nothing but a host's own link limits the network, whose messages cost no core time beside
`overhead_s`, and ranks are numbered host by host. Arrival times spread as N grows, so at scale a
computed time is a lower bound.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import live
from benchmarks.model_picture import draw
from benchmarks.model_ways import WAYS, Cluster, Costs, Network, ms

RESULTS = Path(__file__).resolve().parent / "results"
MANUAL = RESULTS.parents[1] / "docs" / "transports-inside.md"
PICTURE = MANUAL.with_name("all_reduce_at_scale.svg")
COLLECTIVES = ("collectives.json", "collectives_4_ranks.json", "collectives_8_ranks.json")
SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "25 MB": 25 << 20, "100 MB": 100 << 20}
HOSTS = tuple(1 << k for k in range(8))
SHOWN = (1, 16, 128)  # hosts, in the table
CORES = 2  # of the machine that has measured
# Seconds, or seconds for a byte; and the source. A byte in shared memory counts once for each rank
# of the host, and Open MPI's bytes keep their measured price in bytes of shared memory.
ASSUMED = {
    "sync": (10e-6, "measured here for two ranks with a core each: docs/transports-inside.md"),
    "switch": (0.0, "each rank has a core"),
    "memory_byte": (1 / 100e9, "half of what eight channels of DDR4-3200 give a host"),
    "gloo_message": (20e-6, "10 to 30 us one way through the kernel's TCP: kentino.com"),
    "gloo_byte": (8 / 42e9, "42 Gbit/s a core through the kernel: Cai et al., SIGCOMM 2021"),
    "mpi_message": (0.5e-6, "shared memory within a host: commonly seen with osu_latency"),
}
# Core time: a send and a receive of 2 KB took 2.6 us here, and Gloo's event loop comes on top.
TCP = Network(20e-6, 5e-6, 42e9 / 8, 100e9 / 8)
MPI = Network(2e-6, 0.3e-6, 100e9 / 8, 100e9 / 8)  # 1.93 us: Open MPI, kernel bypass: Cisco's blog


def here(
    hosts: int, per_host: int, costs: Costs, link: dict[str, float], is_one_machine: bool = False
) -> Cluster:
    """Return hosts of CORES cores, or as many on one such machine, on a link as measured."""
    beside = per_host * (hosts if is_one_machine else 1)
    kernel_s = costs["gloo_message"] * max(1, beside / CORES)
    delay_s, rate = link.get("round_trip_ms", 2) / 2000, link.get("stream_mbit", 1000) * 1e6 / 8
    net = Network(delay_s + kernel_s, TCP.overhead_s, math.inf, rate)
    return Cluster(hosts, per_host, beside, CORES, net, net)


def there(hosts: int, per_host: int) -> Cluster:
    return Cluster(hosts, per_host, per_host, per_host, TCP, MPI)  # a core for each rank


@dataclass(frozen=True)
class Point:
    """A measured all-reduce: median, lowest and highest milliseconds."""

    way: str
    hosts: int
    per_host: int
    size: str
    measured: list[float]
    link: dict[str, float]

    @property
    def num_bytes(self) -> int:
        number, unit = self.size.split()
        return int(number) << {"B": 0, "KB": 10, "MB": 20}[unit]

    def cluster(self, costs: Costs) -> Cluster:
        return here(self.hosts, self.per_host, costs, self.link, is_one_machine=True)


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())  # type: ignore[no-any-return]


def points() -> list[Point]:
    found = []
    for record in map(read, COLLECTIVES):
        for case, arms in record["seconds"].items():
            if size := re.fullmatch(r"all_reduce (\d+ \w+)", case):
                times = {way: [1000 * s for s in arms[way]] for way in WAYS if way in arms}
                found += [Point(w, 1, record["ranks"], size[1], t, {}) for w, t in times.items()]
    for layout, record in read("several_hosts.json").get("layouts", {}).items():
        for case, arms in record["cases"].items():
            size = re.fullmatch(r"all_reduce (\d+ \w+)", case)  # of float32
            if size and (shape := re.fullmatch(r"(\d+) x (\d+)", layout)):
                # With few blocks there is no interval.
                times = {arm: [v for v in row["ms"].values() if not math.isnan(v)]
                         for arm, row in arms.items()}  # fmt: skip
                times["mpi4py"] = times.pop("mpi", [])
                found += [Point(way, int(shape[1]), int(shape[2]), size[1], t, record["link"])
                          for way, t in times.items() if way in WAYS and t]  # fmt: skip
    return found


def fit(found: list[Point]) -> Costs:
    """Return the costs of one host whose relative errors are least; none is negative."""
    costs: Costs = {"s": 1.0, "gloo_message": 0.0, "gloo_byte": 0.0}
    for way in ("gloo", "shm", "raw"):
        of_it = [p for p in found if p.way == way and p.hosts == 1]
        terms = [WAYS[way](p.cluster(costs), p.num_bytes, costs) for p in of_it]
        names = sorted({name for row in terms for name in row})
        while True:
            table = [[1000 * row[name] / p.measured[0] for name in names]
                     for row, p in zip(terms, of_it, strict=True)]  # fmt: skip
            values = np.linalg.lstsq(np.array(table), np.ones(len(table)), rcond=None)[0]
            if min(values) >= 0:
                break
            costs[names.pop(int(np.argmin(values)))] = 0.0
        costs |= dict(zip(names, map(float, values), strict=True))
    return costs


def summary() -> dict[str, Any]:
    """Return what is fitted, assumed, measured and computed; times in ms."""
    found = points()
    fitted = fit(found)
    taken = {name: value for name, (value, _) in ASSUMED.items()}
    dearer = {n: s / fitted["memory_byte"] * taken["memory_byte"] for n, s in fitted.items()}
    cluster = {n: s for n, s in dearer.items() if "_byte" in n} | taken | {"s": 1.0}
    check = {}
    for p in found:
        computed = ms(p.way, p.cluster(fitted), p.num_bytes, fitted)
        row = {"measured": p.measured, "computed": computed, "ratio": computed / p.measured[0]}
        check[f"{p.way}, {p.hosts} x {p.per_host}, {p.size}"] = row
    kinds: dict[str, tuple[list[Cluster], Costs]] = {
        "one host of 2 cores": ([here(1, n, fitted, {}) for n in (2, 4, 8)], fitted),
        "hosts with 2 cores and ranks, 1 Gbit/s, 1 ms": (
            [here(h, 2, fitted, {}) for h in HOSTS[1:]], fitted),
        "assumed: hosts with 8 ranks, 100 Gbit/s": ([there(h, 8) for h in HOSTS], cluster),
        "assumed: hosts with 1 rank, 100 Gbit/s": ([there(h, 1) for h in HOSTS[3:]], cluster),
    }  # fmt: skip
    times: dict[str, Any] = {
        kind: {size: {way: {f"{c.hosts} x {c.per_host}": ms(way, c, num_bytes, costs)
                            for c in clusters} for way in WAYS}
               for size, num_bytes in SIZES.items()}
        for kind, (clusters, costs) in kinds.items()
    }  # fmt: skip
    networks = {"assumed TCP": vars(TCP), "assumed MPI": vars(MPI)}
    return {"costs": {"fitted": fitted, "assumed": ASSUMED, **networks}, "check": check,
            "computed": times}  # fmt: skip


def figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def table(found: dict[str, Any]) -> str:
    """Return a table of what `summary` returns."""
    check, lines = found["check"], [f"| ms: {', '.join(WAYS)} | {' | '.join(SIZES)} |", "|---" * 5]
    lines[1] += "|"
    layouts = dict.fromkeys(name.split(", ")[1] for name in check)
    for layout in layouts:
        for kind in ("measured", "computed"):
            cells = []
            for size in SIZES:
                rows = [check.get(f"{way}, {layout}, {size}") for way in WAYS]
                values = [row and row[kind] for row in rows]
                firsts = [v[0] if isinstance(v, list) else v for v in values]
                cells.append(", ".join("-" if v is None else figure(v) for v in firsts))
            lines.append(f"| {kind}, {layout} | {' | '.join(cells)} |")
    for kind, sizes in list(found["computed"].items())[2:]:
        for layout in [name for name in sizes["1 KB"]["shm"] if int(name.split()[0]) in SHOWN]:
            cells = [
                ", ".join(figure(ways[way][layout]) for way in WAYS) for ways in sizes.values()
            ]
            lines.append(f"| computed, {kind.split(':')[0]}, {layout} | {' | '.join(cells)} |")
    return "\n".join(lines)


def agreement(found: dict[str, Any]) -> str:
    """Return the manual's line on how far computed times are from measured ones."""
    check, within = found["check"], []
    for layout in dict.fromkeys(name.split(", ")[1] for name in check):
        ratios = [row["ratio"] for name, row in check.items() if name.split(", ")[1] == layout]
        good = sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios)
        within.append(f"{good} of {len(ratios)} points ({layout})")
    return f"Computed and measured times agree within a factor of 1.5 at {', '.join(within)}.\n"


def outputs() -> dict[Path, str]:
    """Return the text of each file that shows the model; a test compares them."""
    text = live.summary_text(summary())
    found = json.loads(text)
    line = re.compile(r"Computed and measured times agree [^\n]*\n")
    manual = line.sub(agreement(found), MANUAL.read_text())
    return {RESULTS / "model.json": text, PICTURE: draw(found), MANUAL: manual}


def main() -> None:
    for path, text in outputs().items():
        path.write_text(text)
    found = read("model.json")
    for name, row in found["check"].items():
        print(f"{name:28}{row['measured'][0]:12.4f}{row['computed']:12.4f}{row['ratio']:8.2f}")
    print(f"\n{table(found)}\n\n{agreement(found)}", end="")


if __name__ == "__main__":
    main()

"""Methodology: the questions that a reviewer asks about a benchmark, with their answers.

`report` prints them under "How this was measured". Every answer is computed from the record and its
summary; where the record lacks the data, the answer is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.compare import formatting as wording
from hvdtrain.compare.analysis.conditions import stop_rule
from hvdtrain.compare.formatting import count

Json = dict[str, Any]
UNKNOWN = "The record does not say."


def answers(record: Json, summary: Json) -> list[tuple[str, str]]:
    """Return pairs of question and answer, in plain text."""
    return [(question, answer(record, summary) or UNKNOWN) for question, answer in QUESTIONS]


def _base(record: Json, summary: Json) -> str:
    rows = [row for row in summary["speed"] if row["role"] == "baseline"]
    if not rows:
        return ""
    times = "; ".join(
        f"{wording.figures(row['step_ms'])} ms a step on {count(row['ranks'], 'rank')}"
        if row["step_ms"]
        else f"{row['arm']} {wording.missing(row)}"
        for row in rows
    )
    text = f"{rows[0]['name']}, with {wording.settings(rows[0].get('settings'))}: {times}. "
    if by_hand := [row["name"] for row in summary["speed"] if row["role"] == "by hand"]:
        text += f"So that the baseline is no straw man, {by_hand[0]}, a DDP loop written out by "
        text += "hand, on the same data loading, runs beside it, and so does the same training "
        text += "without communication."
    return text


def _tuned(record: Json, summary: Json) -> str:
    if not summary["tuning"]:
        return (
            "No arm was: all run with their defaults (--tune searches for better settings, with "
            "the same budget for each arm)."
        )
    base = next((row["name"] for row in summary["speed"] if row["role"] == "baseline"), "")
    names = {row["arm"].partition(" ")[0] for row in summary["tuning"]}
    of_base = "the baseline included" if base in names else "the baseline has none"
    budgets = sorted({str(row.get("budget")) for row in summary["tuning"]} - {"None"})
    return (
        f"All that have settings to choose were ({of_base}), with the same budget "
        f"({', '.join(budgets) or 'unknown'}). Candidates were timed in blocks of their own; where "
        "one beat the defaults, it was timed again beside them and all other arms, so that a lucky "
        "candidate gains nothing. Tuned arms are held against the best of the baseline, never "
        "against its defaults where tuning found better ones."
    )


def _math(record: Json, summary: Json) -> str:
    config = _config(record)
    samples = sorted(
        {(arm["ranks"], arm.get("samples_per_step")) for arm in record["arms"].values()},
        key=str,
    )
    said = ", ".join(f"{n} samples a step on {count(ranks, 'rank')}" for ranks, n in samples if n)
    text = f"{summary['verdict']['text'][:1].upper()}{summary['verdict']['text'][1:]}. "
    text += "Before anything was timed, every arm trained the same steps from the same start, and "
    text += "samples, learning rate, dtypes, bytes of gradients that the optimizer was handed, "
    text += "gradients and parameters were compared"
    return text + (f" ({said}; {config['precision']})." if said and "precision" in config else ".")


def _runs(record: Json, summary: Json) -> str:
    load, config = summary["load"], _config(record)
    text = f"{count(load['blocks_measured'], 'block')}, of which {load['blocks_kept']} count"
    if steps := config.get("steps_per_block"):
        text += f", of {steps} steps for each arm"
    if starts := config.get("starts"):
        text += f", in {count(starts, 'start')} of all processes"
    return text + (
        ". In each block every arm runs once, in random order, so that whatever the machine does "
        "meanwhile happens to all. Nothing is the best of several."
    )


def _variance(record: Json, summary: Json) -> str:
    text = (
        "Every ratio is the median over blocks of the ratio within a block, with a 95 % bootstrap "
        "interval over blocks. "
    )
    bands = [band for band in summary["aa"] if band["spread"] is not None]
    if not bands:
        return text + (
            "There are no blocks of the baseline against itself (A/A), or not enough of them, to "
            "say what noise is, so no difference is claimed."
        )
    said = ", ".join(
        f"{wording.share(band['spread'])} on {count(band['ranks'], 'rank')}" for band in bands
    )
    return text + (
        f"The baseline is measured against itself as well (A/A spread: {said}); an arm is called "
        "faster or slower only if its interval excludes 1 and its difference exceeds that spread."
    )


def _stopped(record: Json, summary: Json) -> str:
    config = _config(record)
    if "target_ci" not in config:
        return ""
    text = f"The rule was set beforehand: {stop_rule(config)}."
    if by := config.get("stopped_by"):
        text += f" It was {by} that ended it."
    return text


def _units(record: Json, summary: Json) -> str:
    return (
        "Global. Samples/s and CPU seconds are of all ranks together; the time of a step is that "
        "of its slowest rank; peak memory is that of the largest rank."
    )


def _data(record: Json, summary: Json) -> str:
    config = _config(record)
    options = config.get("set") or {}
    with_options = f" with {wording.settings(options)}" if options else ""
    for name, value in summary["environment"]:
        if "data" in name.lower():
            return f"Task {config.get('task')}{with_options}; {name}: {value}."
    return f"Whatever the task {config.get('task')}{with_options} loads." if config else ""


def _warm_up(record: Json, summary: Json) -> str:
    steps = {arm.get("warm_up_steps") for arm in record["arms"].values()} - {None, 0}
    if not steps:
        return ""
    said = str(max(steps)) if len(steps) == 1 else f"{min(steps)} to {max(steps)}"
    uneven = [key for key, arm in record["arms"].items() if arm.get("even") is False]
    text = f"Outside: each arm took {said} steps before its first timed one, until each had taken "
    text += "equally long, within 5 %, twice in a row"
    return text + (f"; but not {', '.join(uneven)}, for all the time it had." if uneven else ".")


def _threads(record: Json, summary: Json) -> str:
    forces = [rank for arm in record["arms"].values() for rank in arm.get("in_force") or []]
    if not forces:
        return ""
    threads = sorted({rank.get("threads") for rank in forces} - {None})
    pinned = "pinned to cores" if _config(record).get("pinned") else "not pinned"
    if len(threads) == 1:
        said = (
            f"The same threads in every rank of every arm: {count(threads[0], 'thread')}, {pinned}"
        )
    else:
        said = f"NOT the same everywhere: {', '.join(map(str, threads))} threads, {pinned}"
    cores = {len(rank["affinity"]) for rank in forces if rank.get("affinity")}
    if len(cores) > 1:
        said += f"; NOT the same cores: from {min(cores)} to {max(cores)} a rank"
    elif cores:
        said += f", {count(cores.pop(), 'core')} a rank"
    return said + ", as found inside the ranks once they ran, not as requested."


def _extra(record: Json, summary: Json) -> str:
    text = (
        "Every arm runs the same loop, but for the one by hand, whose point is another; for "
        "buffers, clipping and accumulation all have one policy, and nothing is logged, "
        "evaluated or saved within a block. While an arm runs, the ranks of all others are stopped."
    )
    sizes = {arm.get("gradient_bytes") for arm in record["arms"].values()} - {None, 0}
    if len(sizes) == 1:
        text += f" There are {wording.figures(sizes.pop() / 1e6)} MB of gradients in a step."
        text += " What goes over the wire for them is each engine's own affair, and not counted."
    return text


def _versions(record: Json, summary: Json) -> str:
    found = record.get("versions") or {}
    return ", ".join(f"{name} {value}" for name, value in found.items() if value)


def _noisy(record: Json, summary: Json) -> str:
    load = summary["load"]
    text = f"{load['rule'][:1].upper()}{load['rule'][1:]}. "
    text += f"{load['blocks_measured'] - load['blocks_kept']} of {load['blocks_measured']} were"
    if load["foreign_median"] is not None:
        text += f"; other processes took {wording.share(load['foreign_median'])} of the cores "
        text += f"(median; at most {wording.share(load['foreign_max'])})"
    if load["steal_max"] is not None:
        text += f", the host of a virtual machine at most {wording.share(load['steal_max'])}"
    return text + "."


def _general(record: Json, summary: Json) -> str:
    machine = record.get("machine") or {}
    cores = machine.get("cores")
    sizes = _config(record).get("ranks") or []
    ranks = "1 rank" if sizes == [1] else f"{', '.join(map(str, sizes)) or 'a few'} ranks"
    text = f"This is {ranks} on one host"
    text += f" with {count(cores, 'core')}" if cores else ""
    text += f" ({machine['cpu']})" if machine.get("cpu") else ""
    text += (
        ", and nothing else: on other hardware, over a network or with another model the order of "
        "the arms can be another. Throughput is not time to a quality, either"
    )
    if summary["verdict"]["equal"]:
        text += "; but arms that compute the same parameters need the same number of steps"
    if 1 in (_config(record).get("ranks") or []):
        text += (
            ". At one rank Horovod registers no hooks, and DDP still copies and reduces: that "
            "comparison is of something else"
        )
    return text + "."


def _config(record: Json) -> Json:
    return record.get("config") or {}


# An answer is an empty string where the record lacks the data.
QUESTIONS: list[tuple[str, Callable[[Json, Json], str]]] = [
    ("What is the baseline, and how long does it take?", _base),
    ("Was the baseline tuned as well as the others?", _tuned),
    ("Is it the same global batch and the same mathematics?", _math),
    ("How many runs is each number from?", _runs),
    ("How uncertain are the numbers?", _variance),
    ("When did measuring stop?", _stopped),
    ("Are the units per rank or of all ranks?", _units),
    ("Is the data real or synthetic?", _data),
    ("Is warm-up inside or outside of the measurement?", _warm_up),
    ("Had all arms the same threads and cores?", _threads),
    ("Does one arm do extra work?", _extra),
    ("What did other programs on the machine do?", _noisy),
    ("Which versions are these?", _versions),
    ("Does this hold elsewhere?", _general),
]

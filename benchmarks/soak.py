"""`make soak`: what one run cannot show. Kills at random moments, durations, accuracy over seeds.

    python benchmarks/soak.py [--rounds 5] [pytest's arguments]

Runs the tests that are marked `soak`, one after another, as often as `--rounds` says. Writes how
often each passed, with the seconds of each round, the commit and the machine. Not part of CI: a
failed round here is a finding to look into, and how often it happens is part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from hvdtrain.system import provenance

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/soak.json"


def run_round(arguments: list[str]) -> dict[str, tuple[str, float]]:
    """Run all tests once; return the outcome of each, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # One test at a time; the plugin of pytest-xdist stays, whose marks the tests have.
        line = [sys.executable, "-m", "pytest", "-m", "soak", "-n", "1", f"--junitxml={report}"]
        subprocess.run([*line, *arguments], cwd=ROOT)
        outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            outcomes[name] = (kinds[0] if kinds else "passed", float(case.get("time", "0")))
        return outcomes


def main() -> int:
    """Return 1 if a test failed in a round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args, rest = parser.parse_known_args()
    rounds = [run_round(rest) for _ in range(args.rounds)]
    tests, failed = {}, 0
    for name in sorted({name for one in rounds for name in one}):
        seen = [one[name] for one in rounds if name in one]
        passed = sum(outcome == "passed" for outcome, _ in seen)
        failed += len(seen) - passed
        tests[name] = {
            "passed": passed,
            "rounds": len(seen),
            "seconds": [round(seconds, 1) for _, seconds in seen],
        }
        print(f"{passed} of {len(seen)} passed: {name}")
    about = {
        "commit": provenance.commit(),
        "date": provenance.now(),
        "versions": provenance.versions(),
        "cores": len(os.sched_getaffinity(0)),
        "tests": tests,
    }
    RESULTS.write_text(json.dumps(about, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

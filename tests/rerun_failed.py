"""`make again`: repeat the one or two tests that have failed in a run of the suite.

Among some 4,000 tests of real processes, one may fail once in hundreds of runs because of a race.
CI must distinguish that from a regression, and hides nothing: it stays red for more than two failed
tests, for a test that fails again in one of ten runs, and for anything left behind. Tests that pass
all ten runs are printed, to be investigated: such a failure has often been a real fault.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CACHE = Path(".pytest_cache")
STAYED_BEHIND = "hvdtrain/stayed_behind"
"""Key in pytest's cache: whether processes or shared memory were left after the last test."""
AT_MOST = 2
RUNS = 10


def main() -> int:
    """Return the exit code."""
    if _record(STAYED_BEHIND) is not False:
        print("no second look: something stayed behind, or the suite did not come to its end")
        return 1
    failed = list(_record("cache/lastfailed") or {})
    if not 1 <= len(failed) <= AT_MOST:
        print(f"no second look: {len(failed)} failed tests on record, not 1 to {AT_MOST}")
        return 1
    # A separate cache: the suite's own keeps the record of the whole run.
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={CACHE}/again", *failed]
    for run in range(1, RUNS + 1):
        print(f"\nsecond look {run}/{RUNS}: {' '.join(failed)}", flush=True)
        if subprocess.run(command).returncode:
            print(f"failed again in run {run}: {' '.join(failed)}")
            return 1
    print(f"\nUNSTEADY: failed once, and then passed {RUNS} times. To be looked into:")
    print(*failed, sep="\n")
    return 0


def _record(name: str) -> Any:
    path = CACHE / "v" / name
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())

"""`make again`: a second look at the one or two tests that have failed in a run of the suite.

Some 4,000 tests of real processes that race include one that fails once in hundreds of runs, and
CI must tell that from a fault. Nothing is passed over: more than two are a fault, and so is one
that fails in any of ten more runs, alone. What passes them all is named, to be found and mended:
such a test has often been right.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
AT_MOST = 2
RUNS = 10


def main() -> int:
    """Returns the exit code."""
    failed = list(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 1 <= len(failed) <= AT_MOST:
        print(f"no second look: {len(failed)} failed tests on record, not 1 to {AT_MOST}")
        return 1
    for run in range(1, RUNS + 1):
        print(f"\nsecond look {run}/{RUNS}: {' '.join(failed)}", flush=True)
        # Without its cache: the record stays that of the whole run.
        found = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed])
        if found.returncode:
            print(f"failed again in run {run}: {' '.join(failed)}")
            return 1
    print(f"\nUNSTEADY: failed once, and then passed {RUNS} times. To be looked into:")
    print(*failed, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

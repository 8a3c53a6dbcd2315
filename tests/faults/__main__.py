"""The long form: kill -9 at random moments of every placement and schedule, and configurations by the thousand.

    python -m tests.faults --kills 100 --fuzz 10000

Each chain is one run of ``--steps`` steps that is killed again and again until it is through. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.fuzz import fuzz
from tests.faults.jobs import VARIANTS
from tests.faults.kills import Outcome, chain
from tests.tiny import make_small_embedded

#: Kills of one chain: each costs the start of a job.
CHAIN = 5
#: Failed jobs after which there is no point in going on.
FAILURES = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="moments to try, over all variants; default: 100")
    parser.add_argument("--steps", type=int, default=40, help="of each run; default: 40")
    parser.add_argument("--fuzz", type=int, default=10000, help="configurations to compose; default: 10000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), default=list(VARIANTS))
    given = parser.parse_args()
    outcome, turn = Outcome(), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        model = make_small_embedded(Path(directory) / "model")
        while outcome.kills < given.kills and len(outcome.failed) < FAILURES:
            variant = VARIANTS[given.variants[turn % len(given.variants)]]
            kills = min(CHAIN, given.kills - outcome.kills)
            begin = time.monotonic()
            found = chain(
                variant, model, Path(directory) / str(turn), steps=given.steps, kills=kills, seed=given.seed + turn
            )
            turn += 1
            outcome.add(found)
            print(f"{time.monotonic() - begin:5.0f} s  {', '.join(found.moments)}", flush=True)
            for text in [*found.curve_differences, *found.leftovers, *found.failed]:
                print(f"        {text}", flush=True)
    fuzzed = fuzz(given.fuzz, given.seed) if given.fuzz else None
    for text in fuzzed.failures if fuzzed else ():
        print(f"        {text}", flush=True)
    summary = {
        "kills": outcome.kills,
        "resumed": outcome.resumed,
        "hangs": outcome.hangs,
        "lost_steps_max": outcome.lost_steps_max,
        "curve_differences": len(outcome.curve_differences),
        "fuzzed_configs": fuzzed.tried if fuzzed else 0,
        "tracebacks": len(fuzzed.failures) if fuzzed else 0,
        "leftovers": len(outcome.leftovers),
        "failed": len(outcome.failed),
    }
    print(json.dumps(summary))
    good = outcome.resumed == outcome.kills
    bad = ("hangs", "lost_steps_max", "curve_differences", "tracebacks", "leftovers", "failed")
    return 0 if good and not any(summary[name] for name in bad) else 1


if __name__ == "__main__":
    sys.exit(main())

"""scripts/simulate: more seeds of tests/simulation than the tests run, or one of them in words.

With --lockstep those of replicas that step together (tests/simulation/lockstep.py).
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from simulation import lockstep, world


def show(seed: int, together: bool = False) -> bool:
    """Run one seed and print everything; of replicas that step together, what it comes to."""
    try:
        result = lockstep.run(seed) if together else world.run(seed, show=print)
    except Exception:
        traceback.print_exc()
        return False
    print(result)
    return True


def search(
    first: int, num_seeds: int, verbose: bool, run: Callable[[int], Any] = world.run, flag: str = ""
) -> list[int]:
    """Run many seeds. Returns those that fail."""
    failed: list[int] = []
    totals: Counter[str] = Counter()
    start = time.perf_counter()
    for seed in range(first, first + num_seeds):
        try:
            result = run(seed)
        except Exception as error:
            failed.append(seed)
            again = f"scripts/simulate {flag}--seed {seed}"
            print(f"seed {seed} failed: {error!r}\n    {again}", flush=True)
            continue
        totals.update(result.counts)
        totals["events"] += result.num_events
        if verbose:
            print(f"seed {seed}: {result}", flush=True)
    seconds = time.perf_counter() - start
    counts = ", ".join(f"{count} {name}" for name, count in sorted(totals.items()))
    print(f"{num_seeds} seeds in {seconds:.1f} s, {len(failed)} failed; {counts}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--seed", type=int, help="only this one, with all that happens in it")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for each seed")
    parser.add_argument("--lockstep", action="store_true", help="replicas that step together")
    options = parser.parse_args()
    if options.seed is not None:
        return 0 if show(options.seed, options.lockstep) else 1
    if options.lockstep:
        failed = search(options.first, options.seeds, options.verbose, lockstep.run, "--lockstep ")
        return 1 if failed else 0
    return 1 if search(options.first, options.seeds, options.verbose) else 0


if __name__ == "__main__":
    sys.exit(main())

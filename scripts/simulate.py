"""scripts/simulate: more seeds of tests/simulation than the tests run, or one of them in words."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from simulation import world


def show(seed: int) -> bool:
    """Run one seed and print everything."""
    try:
        result = world.run(seed, show=print)
    except Exception:
        traceback.print_exc()
        return False
    print(result)
    return True


def search(first: int, num_seeds: int, verbose: bool) -> list[int]:
    """Run many seeds. Returns those that fail."""
    failed: list[int] = []
    totals: Counter[str] = Counter()
    start = time.perf_counter()
    for seed in range(first, first + num_seeds):
        try:
            result = world.run(seed)
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed} failed: {error!r}\n    scripts/simulate --seed {seed}", flush=True)
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
    options = parser.parse_args()
    if options.seed is not None:
        return 0 if show(options.seed) else 1
    return 1 if search(options.first, options.seeds, options.verbose) else 0


if __name__ == "__main__":
    sys.exit(main())

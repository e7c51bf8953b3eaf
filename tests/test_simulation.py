"""The whole topology under simulated faults: scores of seeds, each another load and other deaths.

A seed that fails is run again, with all that happens in it, by `scripts/simulate --seed N`.
"""

import functools
import math
import os
import subprocess
import sys
from collections import Counter

import pytest
from simulation import lockstep, mutations, scenario, world

from ringcast.actors import topology

NUM_DRAWN = 300
NUM_SEEDS = 60
NUM_LOCKSTEP_SEEDS = 100
BATCHES, LOCKSTEP_BATCHES = 10, 5


@functools.cache
def run(seed):
    try:
        return world.run(seed)
    except Exception as error:
        error.add_note(f"seed {seed}; to see it: scripts/simulate --seed {seed}")
        raise


@pytest.mark.parametrize("batch", range(BATCHES))
def test_seeds(batch):
    for seed in range(batch, NUM_SEEDS, BATCHES):
        run(seed)


@pytest.mark.parametrize("batch", range(LOCKSTEP_BATCHES))
def test_lockstep_seeds(batch):
    totals = Counter()
    for seed in range(batch, NUM_LOCKSTEP_SEEDS, LOCKSTEP_BATCHES):
        try:
            totals += Counter(lockstep.run(seed).counts)
        except Exception as error:
            error.add_note(f"seed {seed}; to see it: scripts/simulate --lockstep --seed {seed}")
            raise
    things = ("waves", "dummy_steps", "handed over", "overshoot_tokens", "deaths of all replicas")
    assert min(totals[thing] for thing in (*things, "deaths of the coordinator")) > 3


def test_lockstep_of_64():
    counts = lockstep.run(0, replicas=64).counts
    assert counts["dummy_steps"] > 1000


def test_every_kind_of_thing_happens():
    """Nobody would notice if the seeds stopped to draw what they are for."""
    drawn = [scenario.draw(seed) for seed in range(NUM_DRAWN)]
    assert {one.profile for one in drawn} == set(scenario.PROFILES)
    faults = {(fault.kind, fault.actor) for one in drawn for fault in one.faults}
    actors = ("tokenizer.0", "scheduler.0", "worker.0", "detokenizer.0", "client.0", "client.1")
    replicas = tuple(f"{kind}.{i}" for kind in ("scheduler", "worker") for i in (1, 2, 3))
    assert {("kill", "tokenizer.1"), ("kill", "detokenizer.1")} <= faults
    numbers = {(one.config.tokenizer_count, one.config.detokenizer_count) for one in drawn}
    assert numbers == {(1, 1), (1, 2), (2, 1), (2, 2)}
    for kind in ("kill", "stall"):
        assert {(kind, actor) for actor in (*actors, "coordinator.0")} <= faults
    assert {("kill", actor) for actor in replicas} <= faults
    assert {one.config.data_parallel_size for one in drawn} == {1, 2, 3, 4}
    assert Counter(one.config.lockstep for one in drawn)[True] > 50
    assert {one.config.data_parallel_routing for one in drawn} == {"score", "prefix"}
    killed = {
        (topology.engine_of(fault.actor, one.counts), topology.rank_of(fault.actor, one.counts))
        for one in drawn
        for fault in one.faults
        if fault.kind == "kill" and fault.actor.startswith("worker.")
    }
    assert {(0, 1), (1, 0), (1, 1)} <= killed
    assert any(fault.seconds == math.inf for one in drawn for fault in one.faults)
    assert {one.config.max_steps_in_flight for one in drawn} == {1, 2, 3}
    assert {one.config.pipeline_parallel_size for one in drawn} == {1, 2, 3}
    assert {scale.replicas for one in drawn for scale in one.scales} == {1, 2, 3, 4}
    totals = Counter()
    for seed in range(30):
        totals += Counter(run(seed).counts)
    things = ("preemptions", "forks", "prefix_cache_hits", "chunked_prefills", "overshoot_tokens")
    assert min(totals[thing] for thing in (*things, "takeovers", "poisoned")) > 10
    assert totals["scales"] > 20
    assert min(totals[state] for state in ("ended", "failed", "lost", "refused")) > 10


def test_a_seed_replays_exactly():
    """In another process too, where sets of names have another order."""
    seeds = [1, 5, 12, 18]
    here = [run(seed).digest for seed in seeds]
    assert here == [world.run(seed).digest for seed in seeds]
    assert len(set(here)) == len(seeds)
    command = f"from simulation import world\nfor seed in {seeds}: print(world.run(seed).digest)"
    folder = os.path.dirname(__file__)
    paths = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": paths}
    # -I would drop PYTHONPATH; -P keeps the root folder's names out.
    there = subprocess.run(
        [sys.executable, "-P", "-c", command],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.split() == here


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.slow or i % 3 else [])
        for i, one in enumerate(mutations.MUTATIONS)
    ],
)
def test_mutations_are_found(mutation):
    found = mutations.find(mutation)
    assert found is not None, f"{mutation.name}: not found by {mutation.most} seeds"


def test_without_mutations_nothing_is_found():
    """What `find` finds is the mutation, not something else that its seeds do."""
    harmless = mutations.Mutation("none", world.World, "run", lambda right: right, most=20)
    assert mutations.find(harmless) is None


@pytest.mark.parametrize(
    "mutation", mutations.LOCKSTEP_MUTATIONS, ids=lambda mutation: mutation.name
)
def test_mutations_of_waves_are_found(mutation):
    found = mutations.find_in_lockstep(mutation)
    assert found is not None, f"{mutation.name}: not found by {mutation.most} seeds"

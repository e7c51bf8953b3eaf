"""Experts that move between ranks, which are threads here: in every step each rank has, in each
slot that tokens are sent to, that expert's weights."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ringcast.executor import expert_balancer
from ringcast.executor.expert_balancer import ExpertBalancer
from ringcast.executor.expert_placement import balancedness, initial
from ringcast.executor.expert_routes import Routes
from ringcast.executor.host_experts import HostExperts
from ringcast.executor.parallel import HostGroup, map_memory
from ringcast.kernels.cpu import exchange
from ringcast.mq.eplb_config import EplbConfig
from ringcast.mq.errors import PeerDeadError

LAYERS, EXPERTS = 3, 8


def weight_of(layer, e, kind):
    """2,080 or 96 numbers of an expert."""
    shape = [(40, 52), (8, 12)][kind]
    return torch.full(shape, 100.0 * layer + e + kind / 2).to(torch.bfloat16)


def on_every_rank(ranks, act):
    fd, results, errors = os.memfd_create("ranks"), [None] * ranks, []

    def run(rank):
        torch.set_num_threads(1)
        try:
            memory = map_memory(fd, exchange.memory_bytes(ranks))
            results[rank] = act(HostGroup(rank, ranks, memory, 30.0))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    if errors:
        raise errors[0]
    return results


def mixtures_of(rank, ranks, slots):
    placement = initial(EXPERTS, ranks, slots)
    return [
        SimpleNamespace(
            routes=Routes(EXPERTS, placement, rank),
            loads_E=np.zeros(EXPERTS, np.int64),
            weights=[
                torch.stack([weight_of(layer, e, kind) for e in placement[rank].tolist()])
                for kind in range(2)
            ],
        )
        for layer in range(LAYERS)
    ]


def check(mixtures, rank):
    for layer, mixture in enumerate(mixtures):
        routes = mixture.routes
        own = routes.placement_RS[rank].tolist()
        for slot, e in enumerate(own):
            for kind in range(2):
                assert torch.equal(mixture.weights[kind][slot], weight_of(layer, e, kind))
            assert slot in routes.places_ER[e]
        assert (routes.places_ER >= 0).sum() == len(own)
        assert (routes.counts_E == np.bincount(routes.placement_RS.ravel())).all()


@pytest.mark.parametrize(("ranks", "slots", "budget"), [(2, 4, 1 << 20), (3, 4, 1)])
def test_weights_are_where_tokens_go(monkeypatch, ranks, slots, budget):
    """Loads that change again and again: rounds of one expert a step, and of all of a layer's."""
    monkeypatch.setattr(expert_balancer, "BYTES_PER_STEP", budget)

    def act(group):
        mixtures = mixtures_of(group.rank, ranks, slots)
        config = EplbConfig(window_size=10, step_interval=20)
        experts = HostExperts(group, mixtures)
        assert experts.num_bytes == sum(weight.nbytes for weight in mixtures[0].weights)
        balancer = ExpertBalancer(config, experts)
        random, evens = np.random.default_rng(5), []
        for step in range(120):
            if step % 40 == 0:
                loads = [random.permutation(2 ** np.arange(EXPERTS)) for _ in mixtures]
            assert balancer.before_step() == step + 1
            check(mixtures, group.rank)
            for mixture, load in zip(mixtures, loads, strict=True):
                mixture.loads_E += load
            placements = [mixture.routes.placement_RS.copy() for mixture in mixtures]
            evens.append(balancedness(np.stack(loads), placements))
        return placements, evens, balancer.rounds, balancer.moved

    first, *others = on_every_rank(ranks, act)
    for other in others:
        assert all((a == b).all() for a, b in zip(first[0], other[0], strict=True))
        assert first[1:] == other[1:]
    _, evens, rounds, moved = first
    assert rounds >= 4
    assert moved > 10
    assert evens[39] > evens[0]
    assert evens[119] > evens[80]


def test_all_ranks_must_come():
    """One that has left is not waited for."""

    def act(group):
        mixtures = mixtures_of(group.rank, 2, 4)
        balancer = ExpertBalancer(EplbConfig(step_interval=1), HostExperts(group, mixtures))
        balancer.before_step()
        mixtures[0].loads_E += 2 ** np.arange(EXPERTS)
        if group.rank:
            group.leave()
            return None
        with pytest.raises(PeerDeadError, match="another rank has left"):
            balancer.before_step()
        return None

    on_every_rank(2, act)

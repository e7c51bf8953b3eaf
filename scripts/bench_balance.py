"""scripts/bench balance: how evenly requests spread over replicas, by simulation; what it costs.

The shipped router and coordinator core serve a bursty trace under a virtual clock. A replica is a
model: it computes one prompt after another at PREFILL tokens a second, what it has cached for
nothing, and then a token every TPOT seconds for each of at most SLOTS requests. Several clients
take the requests, each by chance and half as many as the one before, and know of each other through
the coordinator alone, which hears each replica's load REPORT seconds late. Requests share
beginnings, of which some are popular (Zipf); a replica keeps CACHED of them.

max / mean: the replica with the most requests, waiting and running, over the mean of all, sampled
every 100 ms from the second SETTLE on; the mean of the samples. Likewise the longest queue.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time
from collections import Counter, OrderedDict, deque
from typing import Any, NamedTuple

from figures import machine, number, percentile, table

from ringcast.actors.coordinator_core import CoordinatorCore
from ringcast.frontend.routing import Router
from ringcast.mq import codec
from ringcast.mq.messages import Generate, Load, OutputSpec, TokensPrompt
from ringcast.mq.sampling_params import SamplingParams

PREFILL, TPOT, SLOTS, CACHED = 8000.0, 0.02, 64, 32
SHARED, OWN = 768, 256  # tokens of a prompt that it shares, and that it doesn't
OUTPUTS = (32, 64, 128, 256)
REPORT = 0.01
SETTLE = 5.0
BURST_EVERY, BURST_SECONDS, BURST_FACTOR = 5.0, 1.0, 3.0
HEAD = [
    "replicas",
    "routing",
    "published every",
    "max / mean load",
    "longest queue",
    "TTFT p50, ms",
    "TTFT p99, ms",
    "cached",
    "a choice, us",
]
PARAMS = SamplingParams()


class Request:
    """One under way: what `Router.track` needs, and where it is."""

    def __init__(self, group: int, sent: Generate, arrived: float, outputs: int) -> None:
        self.group, self.sent, self.arrived, self.outputs = group, sent, arrived, outputs
        self.engine = 0
        self.num_out = 0
        self.counted = (0, 0)


class Replica:
    """waiting, in prefill or running. cached: groups whose beginning it has, the newest last."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.computing = False
        self.running = 0
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.clients: Counter[int] = Counter()

    @property
    def load(self) -> int:
        return len(self.waiting) + self.computing + self.running


class Outcome(NamedTuple):
    ratio: float
    longest_queue: float
    ttfts: list[float]
    hits: float
    choose_seconds: float


class Simulation:
    """One trace under one policy. interval: the coordinator's; None: it says nothing."""

    def __init__(
        self, replicas: int, clients: int, policy: str, interval: float | None, seed: int
    ) -> None:
        self.chance = random.Random(seed)
        self.replicas = [Replica() for _ in range(replicas)]
        self.routers = [Router(replicas, i, policy) for i in range(clients)]
        self.coordinator = CoordinatorCore(replicas, clients, interval or 1.0)
        self.interval = interval
        self.ttfts: list[float] = []
        self.ratios: list[float] = []
        self.queues: list[int] = []
        self.hits = self.prompts = 0
        self.choose_seconds = 0.0
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._order = itertools.count()
        groups = 4 * replicas
        self._groups = range(groups)
        weights = [1 / (rank + 1) for rank in range(groups)]
        self._weights = list(itertools.accumulate(weights))

    def run(self, seconds: float, rate: float) -> Outcome:
        self._end = seconds
        self._arrivals(rate * len(self.replicas))
        self._at(SETTLE, self._sample)
        if self.interval is not None:
            self._at(0.0, self._publish)
        while self._events:
            self.now, _, call, arguments = heapq.heappop(self._events)
            if self.now > seconds:
                break
            call(*arguments)
        return Outcome(
            statistics.fmean(self.ratios),
            statistics.fmean(self.queues),
            self.ttfts,
            self.hits / max(self.prompts, 1),
            self.choose_seconds / max(self.prompts, 1),
        )

    def _at(self, when: float, call: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), call, arguments))

    def _arrivals(self, rate: float) -> None:
        """Poisson, BURST_FACTOR times as many in bursts, `rate` a second on average."""
        share = BURST_SECONDS / BURST_EVERY
        low = rate / (1 - share + share * BURST_FACTOR)
        shares = [0.5**client for client in range(len(self.routers))]
        now, number = 0.0, 0
        while now < self._end:
            in_burst = now % BURST_EVERY < BURST_SECONDS
            now += self.chance.expovariate(low * (BURST_FACTOR if in_burst else 1.0))
            (group,) = self.chance.choices(self._groups, cum_weights=self._weights)
            outputs = self.chance.choice(OUTPUTS)
            (client,) = self.chance.choices(range(len(shares)), weights=shares)
            self._at(now, self._arrive, number, client, group, outputs)
            number += 1

    def _arrive(self, number: int, client: int, group: int, outputs: int) -> None:
        router = self.routers[client]
        ids = codec.pack([group] * SHARED) + codec.pack([number]) * OWN
        sent = Generate(str(number), 0, TokensPrompt(ids), PARAMS, OutputSpec(client), self.now)
        request = Request(group, sent, self.now, outputs)
        start = time.thread_time()
        request.engine, request.num_out = router.choose(sent), 1
        router.track(request)
        self.choose_seconds += time.thread_time() - start
        self.prompts += 1
        replica = self.replicas[request.engine]
        replica.clients[client] += 1
        replica.waiting.append(request)
        self._changed(request.engine)
        self._go_on(request.engine)

    def _go_on(self, engine: int) -> None:
        replica = self.replicas[engine]
        if replica.computing or not replica.waiting or replica.running >= SLOTS:
            return
        request = replica.waiting.popleft()
        replica.computing = True
        found = request.group in replica.cached
        self.hits += found
        replica.cached[request.group] = None
        replica.cached.move_to_end(request.group)
        if len(replica.cached) > CACHED:
            replica.cached.popitem(last=False)
        tokens = OWN + (0 if found else SHARED)
        self._at(self.now + tokens / PREFILL, self._computed, request)

    def _computed(self, request: Request) -> None:
        replica = self.replicas[request.engine]
        replica.computing = False
        replica.running += 1
        if self.now > SETTLE:
            self.ttfts.append(self.now - request.arrived)
        self._at(self.now + request.outputs * TPOT, self._ended, request)
        self._changed(request.engine)
        self._go_on(request.engine)

    def _ended(self, request: Request) -> None:
        replica = self.replicas[request.engine]
        replica.running -= 1
        client = request.sent.output.client
        replica.clients[client] -= 1
        request.num_out = 0
        self.routers[client].track(request)
        self._changed(request.engine)
        self._go_on(request.engine)

    def _changed(self, engine: int) -> None:
        if self.interval is not None:
            replica = self.replicas[engine]
            running = replica.running + replica.computing
            clients = list(replica.clients.items())
            load = Load(len(replica.waiting), running, 0.0, clients)
            self._at(self.now + REPORT, self.coordinator.handle, f"scheduler.{engine}", load, 0.0)

    def _publish(self) -> None:
        assert self.interval is not None
        for send in self.coordinator.flush(self.now):
            self.routers[int(send.to.partition(".")[2])].publish(send.message)
        self._at(self.now + self.interval, self._publish)

    def _sample(self) -> None:
        loads = [replica.load for replica in self.replicas]
        if sum(loads):
            self.ratios.append(max(loads) * len(loads) / sum(loads))
        self.queues.append(max(len(replica.waiting) for replica in self.replicas))
        self._at(self.now + 0.1, self._sample)


def coordinator_cost(replicas: int, clients: int, rounds: int) -> tuple[float, float]:
    """Seconds for a replica's report to be taken in, and for a publication to be made and encoded:
    the best of several rounds."""
    reports, publications = [], []
    load = Load(3, 40, 0.5, [(client, 5) for client in range(clients)])
    for _ in range(rounds):
        core = CoordinatorCore(replicas, clients, interval=0.0)
        decode: codec.Decoder[Any] = codec.Decoder(Load)
        payload = codec.encode(load)
        start = time.perf_counter()
        for engine in range(replicas):
            core.handle(f"scheduler.{engine}", decode(payload), 0.0)
        middle = time.perf_counter()
        for send in core.flush(1.0):
            codec.encode(send.message)
        reports.append((middle - start) / replicas)
        publications.append(time.perf_counter() - middle)
    return min(reports), min(publications)


def row(replicas: int, policy: str, interval: float | None, args: argparse.Namespace) -> list[str]:
    simulation = Simulation(replicas, args.clients, policy, interval, args.seed)
    outcome = simulation.run(args.seconds, args.rate)
    return [
        str(replicas),
        policy,
        "never" if interval is None else f"{interval * 1e3:g} ms",
        f"{outcome.ratio:.2f}",
        f"{outcome.longest_queue:.1f}",
        number(1e3 * statistics.median(outcome.ttfts)),
        number(1e3 * percentile(outcome.ttfts, 0.99)),
        f"{100 * outcome.hits:.0f} %",
        number(1e6 * outcome.choose_seconds),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--clients", type=int, default=4, help="API servers")
    parser.add_argument("--seconds", type=float, default=30.0, help="of virtual time")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second and replica")
    parser.add_argument(
        "--intervals",
        type=float,
        nargs="+",
        default=[0.1],
        help="seconds between two publications; 0 for none at all",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rounds", type=int, default=20, help="of the coordinator; the best counts"
    )


def run(args: argparse.Namespace) -> None:
    print(machine())
    rows = [
        row(replicas, policy, interval or None, args)
        for replicas in args.replicas
        for policy in ("score", "prefix")
        for interval in args.intervals
    ]
    print(table(HEAD, rows))
    for replicas in args.replicas:
        report, publication = coordinator_cost(replicas, args.clients, args.rounds)
        print(
            f"coordinator, {replicas} replicas, {args.clients} clients: {1e6 * report:.1f} us for "
            f"a report, {1e6 * publication:.0f} us for a publication"
        )

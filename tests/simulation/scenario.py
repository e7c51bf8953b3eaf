"""What one seed draws: the shape of a topology, its load and its faults. Nothing else is random.

A profile says which faults there are; everything within them is drawn too.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field, replace

from ringcast.actors import topology
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.sampling_params import SamplingParams

from . import reference

POISON = 3  # the first token of a prompt that kills its worker; no other prompt has it
POISON_AT = 4  # the second is this + the number of output tokens at which it does

PROFILES = ("calm", "slow", "crashes", "crashes", "poison", "poison and crashes", "storm", "stop")
_TEXT_ACTORS = ((1, 1), (1, 1), (2, 2), (2, 2), (2, 1), (1, 2))
_WORDS = ("lorem", "ipsum", "dolor", "über", "日本", "🙂", "sit", "amet")


@dataclass
class Wish:
    """One request that a user will make.

    at: seconds after the door was opened. patience: how late chunks are taken. abort_at: seconds
    after it was sent, or None; discard: it is left alone then, not only aborted. poison: the number
    of its output tokens at which it kills its worker.
    """

    client: int
    at: float
    prompt: messages.Prompt
    prompt_ids: list[int]
    params: SamplingParams
    output: messages.OutputSpec
    salt: str
    patience: float
    abort_at: float | None
    discard: bool
    poison: int | None = None
    priority: int = 0


@dataclass
class Fault:
    """kill: `actor` dies `steps` steps after `at`; stall: it does nothing for `seconds`, which may
    be for ever.
    """

    kind: str
    actor: str
    at: float
    steps: int = 0
    seconds: float = 0.0


@dataclass
class Scale:
    """Somebody asks for another number of replicas."""

    at: float
    replicas: int
    drain_seconds: float


@dataclass
class Scenario:
    seed: int
    profile: str
    num_clients: int
    config: EngineConfig
    spec: ModelSpec
    capacity: int  # bytes of each channel
    batch: int  # records taken from one channel at a time
    wake: float  # mean seconds until who is woken runs
    pause: float  # mean seconds between two effects of one actor
    step: float  # mean seconds of a worker's step
    start: float  # mean seconds of a process's start
    kill: float  # mean seconds until a SIGKILL has done its work
    spread: float  # seconds in which the requests come
    max_queued: int
    stop_at: float | None  # the supervisor is stopped then, whatever runs
    restart_faults: float  # how likely a starting process is killed
    wishes: list[Wish] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    scales: list[Scale] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        counts = topology.counts_of(self.config)
        return {**counts, "client": self.num_clients}

    @property
    def faulty(self) -> bool:
        """Whether anything dies but of poison."""
        return self.profile in ("crashes", "poison and crashes", "storm", "stop")

    @property
    def num_slots(self) -> int:
        blocks = self.config.num_gpu_blocks_override
        assert blocks is not None
        return (blocks - 1) * self.config.block_size


def draw(seed: int) -> Scenario:
    rng = random.Random(f"{seed} scenario")
    profile = rng.choice(PROFILES)
    poison = "poison" in profile
    # Of its own, so that a seed's other choices are the same whatever it says.
    replicas = random.Random(f"{seed} replicas")
    max_model_len = rng.choice([48, 96, 96])
    tight = rng.random() < 0.5
    block_size = rng.choice([2, 4, 4, 8])
    config = EngineConfig(
        device="fake",
        data_parallel_size=(size := replicas.choice([1, 1, 2, 3, 4])),
        enable_expert_parallel=(
            together := size > 1 and random.Random(f"{seed} lockstep").random() < 0.4
        ),
        block_size=block_size,
        num_gpu_blocks_override=(rng.choice([48, 64]) if tight else 400) // block_size + 1,
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        long_prefill_token_threshold=rng.choice([0, 0, 4]),
        max_steps_in_flight=rng.choice([1, 2, 3]),
        pipeline_parallel_size=random.Random(f"{seed} stages").choice([1, 1, 1, 2, 3])
        if not together
        else 1,
        scheduling_policy="fcfs" if seed % 2 else "priority",
        enable_prefix_caching=(caching := rng.random() < 0.8),
        tokenizer_count=(numbers := random.Random(f"{seed} text").choice(_TEXT_ACTORS))[0],
        detokenizer_count=numbers[1],
        data_parallel_routing=replicas.choice(["score", "prefix"])
        if size > 1 and caching
        else "score",
        step_timeout=3.0 if profile == "storm" else 60.0,
        startup_timeout=100.0,
        shutdown_timeout=20.0,
        max_restarts=1 if profile == "storm" and rng.random() < 0.2 else 30,
    )
    spec = ModelSpec(
        name="fake",
        path="",
        tokenizer_path="",
        architecture="Fake",
        vocab_size=258,
        max_model_len=max_model_len,
        eos_token_ids=[257],
        hf_config={},
    )
    scenario = Scenario(
        seed=seed,
        profile=profile,
        num_clients=1 if poison else rng.choice([1, 1, 2]),
        config=config,
        spec=spec,
        capacity=rng.choice([64, 300, 2000, 1 << 16]),
        batch=rng.choice([1, 3, 256, 256]),
        wake=rng.choice([2e-5, 2e-4, 2e-3]),
        pause=rng.choice([1e-6, 5e-5, 5e-4]),
        step=rng.choice([5e-4, 3e-3]),
        start=rng.choice([0.02, 0.3]),
        kill=rng.choice([1e-5, 1e-4, 5e-3]),
        spread=rng.choice([0.01, 0.1, 0.5]),
        max_queued=rng.choice([4, 100, 100]),
        stop_at=rng.random() * 0.3 if profile == "stop" else None,
        restart_faults=rng.choice([0.0, 0.15, 0.3]) if profile in ("crashes", "storm") else 0.0,
    )
    stems = [_tokens(rng, 12) for _ in range(2)]
    scenario.wishes = [_wish(rng, scenario, stems) for _ in range(rng.randrange(4, 11))]
    if poison:
        for wish in rng.sample(scenario.wishes, rng.choice([1, 1, 2])):
            _poison(rng, wish)
    scenario.faults = [_spread(replicas, scenario, fault) for fault in _faults(rng, scenario)]
    if numbers != (1, 1):
        _spread_text(random.Random(f"{seed} text faults"), scenario)
    if not config.lockstep:  # those are not scaled
        _scale(random.Random(f"{seed} scales"), scenario)
    if config.scheduling_policy == "priority":
        for wish in scenario.wishes:
            wish.priority = rng.choice([-1, 0, 0, 7])
    return scenario


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(64, 256) for _ in range(count)]


def _prompt(
    rng: random.Random, stems: list[list[int]], longest: int
) -> tuple[messages.Prompt, list[int]]:
    kind = rng.random()
    if kind < 0.6:
        stem = rng.choice(stems)[: rng.randrange(13)]
        ids = stem + _tokens(rng, rng.randrange(1, 8))
        if rng.random() < 0.04:
            ids += _tokens(rng, longest)  # which can't fit
        return messages.TokensPrompt(codec.pack(ids)), ids
    text = " ".join(rng.choices(_WORDS, k=rng.randrange(1, 3)))
    if kind < 0.9:
        return messages.TextPrompt(text), reference.encode(text)
    said = json.dumps([{"role": "user", "content": text}])
    rendered = f"<|user|>{text}\n<|assistant|>"
    return messages.ChatPrompt(said.encode()), reference.encode(rendered)


def _wish(rng: random.Random, scenario: Scenario, stems: list[list[int]]) -> Wish:
    prompt, ids = _prompt(rng, stems, scenario.spec.max_model_len)
    max_tokens = rng.choice([1, 3, 8, 20, 30, None])
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 4]),
        seed=rng.choice([None, 7]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 1, min(6, max_tokens or 6)]),
        logprobs=rng.choice([None, None, 0, 2]),
        include_stop_str_in_output=rng.random() < 0.3,
    )
    if rng.random() < 0.4 and len(ids) + 1 < min(scenario.spec.max_model_len, scenario.num_slots):
        params = _with_stops(rng, scenario, ids, params)
    form = rng.choice(["raw", "raw", "chat", "completion"])
    return Wish(
        client=rng.randrange(scenario.num_clients),
        at=rng.random() * scenario.spread,
        prompt=prompt,
        prompt_ids=ids,
        params=params,
        output=messages.OutputSpec(client=0, form=form, delta=rng.random() < 0.7),
        salt=rng.choice(["", "", "", "salt"]),
        patience=rng.choice([0.0, 1e-4, 0.01, 1.0]),
        abort_at=rng.random() ** 2 * 0.1 if rng.random() < 0.25 else None,
        discard=rng.random() < 0.5,
    )


def _with_stops(
    rng: random.Random, scenario: Scenario, ids: list[int], params: SamplingParams
) -> SamplingParams:
    whole = reference.answer(ids, 0, params, scenario.spec, scenario.num_slots)
    stops, stop_token_ids = ["never"], []
    place = rng.randrange(len(whole.text) + 1)
    found = whole.text[place : place + rng.choice([1, 2, 3])]
    if found and "\ufffd" not in found and rng.random() < 0.7:
        stops.append(found)
    if rng.random() < 0.5:
        stop_token_ids.append(rng.choice(whole.tokens))
    changed = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(
        **changed | {"stop": tuple(stops), "stop_token_ids": tuple(stop_token_ids)}
    )


def _poison(rng: random.Random, wish: Wish) -> None:
    wish.poison = rng.choice([0, 0, 1, 5])
    wish.prompt_ids = [POISON, POISON_AT + wish.poison, *_tokens(rng, 4)]
    wish.prompt = messages.TokensPrompt(codec.pack(wish.prompt_ids))
    wish.params = SamplingParams(max_tokens=12)
    wish.abort_at = None


def _faults(rng: random.Random, scenario: Scenario) -> list[Fault]:
    actors = ["tokenizer.0", "detokenizer.0", "scheduler.0", "worker.0"]
    actors += [f"worker.{rank}" for rank in range(1, scenario.config.num_workers)]
    actors += [f"client.{i}" for i in range(scenario.num_clients)]
    out = []

    def fault(kind: str, at: float | None = None) -> Fault:
        when = rng.random() * (scenario.spread + 0.05) if at is None else at
        actor = rng.choice(actors)
        if actor.startswith("client") and rng.random() < 0.5:
            actor = rng.choice(actors)
        return Fault(kind, actor, when, rng.randrange(40), rng.random() ** 3 * 5.0)

    if scenario.faulty:
        kills = [fault("kill") for _ in range(rng.choice([1, 1, 2, 3]))]
        if rng.random() < 0.3:  # two at once
            kills.append(fault("kill", kills[0].at))
        out += kills
    if scenario.profile in ("slow", "storm", "stop"):
        out += [fault("stall") for _ in range(rng.randrange(1, 4))]
    if scenario.profile == "storm" and rng.random() < 0.5:
        # Not a client: nobody would notice while it is idle.
        out[-1] = Fault("stall", rng.choice(actors[:4]), out[-1].at, seconds=math.inf)
    return out


def _scale(rng: random.Random, scenario: Scenario) -> None:
    """In some seeds. Where things die, some of what is new or goes does, too."""
    if rng.random() < 0.6:
        return
    within = scenario.spread + 3 * scenario.start
    for _ in range(rng.randrange(1, 5)):
        drain = rng.choice([0.0, 0.01, 0.1, 20.0])
        scenario.scales.append(Scale(rng.random() * within, rng.randrange(1, 5), drain))
    if scenario.faulty:
        for _ in range(rng.randrange(3)):
            actor = rng.choice(["scheduler.1", "worker.1", "scheduler.2", "worker.3"])
            at = rng.random() * within
            scenario.faults.append(Fault("kill", actor, at, rng.randrange(20)))


def _spread_text(rng: random.Random, scenario: Scenario) -> None:
    """A fault of a first text actor hits any of its kind; where things die, more of them do."""
    config = scenario.config
    counts = {"tokenizer": config.tokenizer_count, "detokenizer": config.detokenizer_count}

    def any_of(kind: str) -> str:
        return f"{kind}.{rng.randrange(counts[kind])}"

    scenario.faults = [
        replace(fault, actor=any_of(kind)) if kind in counts else fault
        for fault in scenario.faults
        for kind in [fault.actor.partition(".")[0]]
    ]
    if scenario.faulty:
        for _ in range(rng.randrange(3)):
            actor, at = any_of(rng.choice(sorted(counts))), rng.random() * scenario.spread
            scenario.faults.append(Fault("kill", actor, at, rng.randrange(40)))


def _spread(rng: random.Random, scenario: Scenario, fault: Fault) -> Fault:
    """A fault of the first engine hits any of them, or now and then the coordinator instead."""
    replicas = scenario.config.data_parallel_size
    kind, _, rank = fault.actor.partition(".")
    if replicas == 1 or kind not in ("scheduler", "worker"):
        return fault
    if rng.random() < 0.15:
        return replace(fault, actor="coordinator.0")
    size = scenario.config.num_workers if kind == "worker" else 1
    return replace(fault, actor=f"{kind}.{rng.randrange(replicas) * size + int(rank)}")

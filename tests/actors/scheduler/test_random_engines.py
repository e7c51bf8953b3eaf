"""Tens of thousands of random steps on many engines, of which nothing was chosen by hand.

A seed draws an engine (pool, rows, budget, block size, policy, limits of prefills, groups of
layers, prefix caching, steps in flight) and the load on it: requests that begin alike, with several
choices, priorities and stop tokens; aborts, stop strings, takeovers, deaths of clients and of the
detokenizer, resets of the prefix cache.

After each flush the core has checked itself and the worker has executed the plan (conftest.py).
Here each plan is read as well, by someone who knows the limits and nothing else; who was passed,
and who had to give way, is compared with the order; and where the engine has neither prefix caching
nor windows, the plan is the one of scheduler_model.py. At the end everything drains.
"""

import random
from collections import Counter

import pytest
from scheduler_model import Model

from ringcast.actors.core import PeerLost
from ringcast.mq import codec, messages
from ringcast.mq.kv_groups import blocks_for, spec_of

PLENTY = 1 << 40
DRAINED = 8000  # rounds after which whatever is left has ended
WINDOWS = [[0], [0], [0], [0], [7], [0, 5], [0, 9, 9], [4, 6]]  # of the groups of layers


def draw_engine(rng):
    """Options of EngineConfig, the windows, the context length and the EOS ids."""
    block_size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    longest = rng.choice([12, 30, 50, 70])
    budget = rng.choice([rng.randint(1, 6), rng.randint(7, 20), rng.randint(21, 80)])
    threshold = rng.choice([0, 0, rng.randint(1, 12)])
    partial = rng.choice([0, 0, 1, 2, 3])
    caching = rng.random() < 0.6
    windows = rng.choice(WINDOWS) if caching or rng.random() < 0.2 else [0]
    chunk = min(budget, threshold or budget)
    specs = [spec_of(window) for window in windows]
    one, least = (blocks_for(specs, length, chunk, block_size) for length in (longest, 8))
    spare = rng.choice([0, rng.randint(0, one), rng.randint(one, 2 * one), 4 * one])
    options = {
        "block_size": block_size,
        "num_gpu_blocks_override": 1 + max(least, one * rng.choice([2, 3, 4]) // 4) + spare,
        "max_num_seqs": rng.choice([1, 2, 3, 4, 6, 9]),
        "max_num_batched_tokens": budget,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "long_prefill_token_threshold": threshold,
        "max_num_partial_prefills": partial,
        "max_long_partial_prefills": rng.randint(0, partial or 2) if threshold else 0,
        "max_steps_in_flight": rng.choice([1, 2]),
        "enable_prefix_caching": caching,
        "prefix_caching_hash_algo": rng.choice(["blake2b", "sha256"]),
    }
    eos_token_ids = [2, *range(300, 300 + rng.choice([0, 20]))]
    return options, windows, longest, eos_token_ids


class Row:
    """What a worker knows of a sequence. epoch: resets before the oldest that it rests on. salt:
    of its request, which no worker knows.
    """

    def __init__(self, new, epoch, salt):
        self.name = new.request_id, new.choice
        self.known = len(new.token_ids) // 4
        self.computed = new.num_computed_tokens
        self.blocks = codec.ints(new.block_ids).tolist()
        self.epoch = epoch
        self.salt = salt


class Reader:
    """Reads plans, and asserts that they keep to the limits, to resets and to salts."""

    def __init__(self, config, width, requests):
        self.config = config
        self.requests = requests  # prompt and options, by name
        self.width = width  # groups of layers
        self.threshold = config.long_prefill_token_threshold or PLENTY
        self.rows = {}
        self.epoch = 0
        self.origins = {}  # (epoch, salt) of the row that wrote a block

    def read(self, plan):
        """[(name, number of tokens)], in order."""
        for row in codec.ints(plan.removed).tolist():
            del self.rows[row]
        for source, target in pairs(plan.copy_from, plan.copy_to):
            self.origins[target] = self.origins[source]
        for new in plan.new:
            self.rows[new.row] = self.enter(new)
        for row, block in pairs(plan.block_rows, plan.block_ids):
            self.rows[row].blocks.append(block)
        assert len(self.rows) <= self.config.max_num_seqs
        steps = pairs(plan.rows, plan.num_tokens)
        return self.compute([(self.rows[row], count) for row, count in steps], plan)

    def enter(self, new):
        """What it need not compute is not of before the last reset, or else it's a fork."""
        row = Row(new, self.epoch, self.requests[new.request_id][1]["cache_salt"])
        num_blocks = -(-row.computed // self.config.block_size) * self.width
        found = {self.origins[block] for block in row.blocks[:num_blocks] if block}
        assert all(salt == row.salt for _, salt in found), "it found another's"
        row.epoch = min((epoch for epoch, _ in found), default=self.epoch)
        if not is_fork(new):
            assert row.epoch == self.epoch, "it found what was forgotten"
        return row

    def compute(self, steps, plan):
        entered = {(new.request_id, new.choice) for new in plan.new if not is_fork(new)}
        budget, partial, found = self.config.max_num_batched_tokens, [], []
        for row, count in steps:
            if row.name in entered:
                self.check_partial(row, budget, partial)
            assert 0 < count <= min(budget, self.threshold)
            budget -= count
            self.write(row, count)
            row.computed += count
            if row.computed < row.known:
                partial.append(row)
            else:
                assert row.computed == row.known, "it computes what nobody has sampled"
                row.known += 1
            found.append((row.name, count))
        return found

    def check_partial(self, row, budget, partial):
        """Rule 6 of planner.py, when it enters."""
        if row.known > min(budget, self.threshold):
            assert len(partial) < (self.config.max_num_partial_prefills or PLENTY)
        if row.known > self.threshold:
            num_long = sum(other.known > self.threshold for other in partial)
            assert num_long < (self.config.max_long_partial_prefills or PLENTY)

    def write(self, row, count):
        size, width = self.config.block_size, self.width
        last = (row.computed + count - 1) // size
        for block in row.blocks[row.computed // size * width : (last + 1) * width]:
            self.origins[block] = row.epoch, row.salt


def pairs(one, other):
    return zip(codec.ints(one).tolist(), codec.ints(other).tolist(), strict=True)


def is_fork(new):
    """Or a choice that found all of its prompt but the last token, which may be of the same."""
    known = len(new.token_ids) // 4
    return new.choice > 0 and new.num_computed_tokens == new.num_prompt_tokens - 1 == known - 1


class Order:
    """Who waits and who runs before a flush, to tell afterwards who was passed or gave way."""

    def __init__(self, planner, config):
        self.number = planner._number
        self.running = list(planner.running)
        self.waiting = set(planner.waiting)
        self.long_pass = config.max_long_partial_prefills > 0

    def check(self, planner):
        running, waiting = set(planner.running), set(planner.waiting)
        gave_way = min((s.place for s in self.running if s in waiting), default=(PLENTY,))
        for sequence in running.intersection(self.running):
            kept = sequence.preempted_in <= self.number
            assert sequence.place < gave_way or not kept, "who gave way was not the last"
        last = max((s.place for s in running & self.waiting), default=(-1,))
        for sequence in waiting & self.waiting:
            passed = self.long_pass and planner.waiting.is_long(sequence)
            assert sequence.place > last or passed, "it was passed"


class Soak:
    """One engine and its load."""

    def __init__(self, make_engine, model_spec, seed):
        self.rng = rng = random.Random(f"engine {seed}")
        options, windows, longest, eos_token_ids = draw_engine(rng)
        hf_config = {"windows": windows}
        self.windows = windows
        spec = model_spec(
            max_model_len=longest + 1, eos_token_ids=eos_token_ids, hf_config=hf_config
        )
        self.engine = engine = make_engine(spec=spec, **options)
        self.core, self.config, self.planner = engine.core, engine.config, engine.core.planner
        num_slots = engine.core.kv.num_slots
        self.longest = min(longest, num_slots - 1)  # prompt
        self.most = min(longest, num_slots) + 1  # tokens of a sequence
        self.model = None
        if windows == [0] and not engine.config.enable_prefix_caching:
            self.model = Model(engine.config, engine.core.kv.pool.num_usable)
        self.in_flight = []  # of each plan, name by row
        self.requests = {}  # prompt and options, by name
        self.reader = Reader(engine.config, len(windows), self.requests)
        self.choices = {}  # how many, by (request, incarnation)
        self.refused, self.aborted = set(), set()  # requests
        self.stopped = {}  # stream: after so many tokens
        self.num_plans = self.num_pings = 0
        self.stems = [[rng.randrange(1000) for _ in range(self.longest)] for _ in range(3)]
        self.urgent = engine.config.scheduling_policy == "priority"
        self.often, self.seldom = rng.choice([0.1, 0.3, 0.6]), rng.choice([0.0, 0.02, 0.05])

    def run(self, num_steps):
        """So many steps with load, and then without, until nothing is left."""
        statistics = self.core.statistics
        while statistics()["steps"] < num_steps:
            self.act()
            if self.in_flight and (self.config.max_steps_in_flight == 1 or self.rng.random() < 0.9):
                self.answer()
            self.act()
            self.flush()
        for _ in range(DRAINED):
            if self.at_rest:
                break
            if self.in_flight:
                self.answer()
            self.flush()
        assert self.at_rest, f"not at rest after {DRAINED} rounds more"
        self.check_ends()
        return statistics()

    @property
    def at_rest(self):
        pinged = len(self.engine.pings) == self.num_pings
        return pinged and not self.in_flight and not self.core.num_unfinished

    def answer(self):
        names, output = self.in_flight.pop(0), self.engine.outputs[0]
        self.engine.answer()
        if self.model:
            for row, token in pairs(output.rows, output.token_ids):
                self.model.token(names[row], token)

    def flush(self):
        order, first = Order(self.planner, self.config), len(self.engine.plans)
        self.engine.flush()
        order.check(self.planner)
        for plan in self.engine.plans[first:]:
            planned = self.reader.read(plan)
            if self.model:
                assert planned == (self.plan_model() or [])
            self.in_flight.append({row: read.name for row, read in self.reader.rows.items()})
            self.num_plans += 1
        if self.model and len(self.in_flight) < self.config.max_steps_in_flight:
            assert self.plan_model() is None
        assert self.in_flight or not self.core.num_unfinished, "nothing is computed, and some wait"

    def plan_model(self):
        number = self.num_plans
        return self.model.plan(number, number - len(self.in_flight))

    # --- what happens to it -----------------------------------------------------------------------

    def act(self):
        if self.rng.random() < self.often and self.core.num_unfinished < 20:
            self.add()
        for share, what in (
            (1, self.abort),
            (2, self.stop),
            (0.5, self.take_over),
            (0.2, self.lose_client),
            (0.1, self.lose_detokenizer),
            (0.5, self.reset),
            (0.5, self.ping),
        ):
            if self.rng.random() < share * self.seldom:
                what()

    def draw_prompt(self):
        rng = self.rng
        if rng.random() < 0.02:
            return [7] * rng.choice([0, self.longest + 1, self.longest + 9])  # refused
        stem = rng.choice(self.stems)[: rng.randrange(self.longest)]
        tail = [rng.randrange(1000) for _ in range(rng.randint(1, 5))]
        return (stem + tail)[: self.longest]

    def add(self):
        rng = self.rng
        name = f"r{len(self.requests)}"
        options = {
            "client": rng.randrange(4),
            "cache_salt": rng.choice(["", "", "", "salt"]),
            "priority": rng.choice([0, 1, 1, 4]) if self.urgent else 0,
            "n": rng.choice([1, 1, 1, 2, 3, 5]),
            "max_tokens": rng.choice([1, 2, 5, 12, 30, None]),
            "min_tokens": rng.choice([0, 0, 1]),
            "stop_token_ids": rng.sample(range(250, 1000), rng.choice([0, 0, 20])),
            "ignore_eos": rng.random() < 0.5,
            "logprobs": rng.choice([None, None, 1]),
            "prompt_logprobs": rng.choice([None, None, None, 0]),
        }
        self.requests[name] = prompt, options = self.draw_prompt(), options
        self.engine.add(name, prompt, **options)
        self.choices[name, 0] = n = options["n"]
        if not 0 < len(prompt) <= self.longest:
            self.refused.add(name)
        elif self.model:
            most = min(options["max_tokens"] or PLENTY, self.most - len(prompt))
            stop_ids = self.stop_ids(options["stop_token_ids"], options["ignore_eos"])
            stops = stop_ids, options["min_tokens"]
            self.model.add(name, len(prompt), n, options["priority"], most, *stops)

    def stop_ids(self, stop_token_ids, ignore_eos):
        return {*stop_token_ids} | ({*self.engine.spec.eos_token_ids} if not ignore_eos else set())

    def open_streams(self):
        """As the detokenizer knows them."""
        return [stream for stream in self.engine.opened if not self.engine.ends[stream]]

    def abort(self):
        """One that came lately, and may have ended."""
        if self.requests:
            name = self.rng.choice(list(self.requests)[-15:])
            incarnation = max(i for other, i in self.choices if other == name)
            self.engine.abort(name, incarnation)
            self.forget([name])

    def forget(self, names):
        self.aborted.update(names)
        for name in names:
            if self.model:
                self.model.abort(name)

    def stop(self):
        """As after a stop string, in what the detokenizer has seen."""
        tokens = self.engine.tokens
        speaking = [s for s in self.open_streams() if tokens[s] and s not in self.stopped]
        if speaking:
            stream = self.rng.choice(speaking)
            self.stopped[stream] = self.rng.randint(1, len(tokens[stream]))
            self.engine.stop(stream, self.stopped[stream])
            if self.model:
                opened = self.engine.opened[stream]
                self.model.end((opened.request_id, opened.choice))

    def take_over(self):
        """As after a death: a request comes again with what was heard of its open choices."""
        opened = [self.engine.opened[stream] for stream in self.open_streams()]
        if self.model or not opened:
            return
        name = self.rng.choice(opened).request_id
        last = max(i for other, i in self.choices if other == name)
        if all(one.incarnation == last for one in opened if one.request_id == name):
            self.aborted.add(name)
            heard = {m.choice: self.engine.tokens[m.stream] for m in opened if m.request_id == name}
            resume = heard if any(heard.values()) else {}
            prompt, options = self.requests[name]
            self.engine.add(name, prompt, last + 1, resume=resume, **options)
            self.choices[name, last + 1] = len(resume) or options["n"]

    def lose_client(self):
        client = self.rng.randrange(4)
        told = [
            lambda: self.engine.handle(PeerLost(), f"client.{client}"),
            lambda: self.engine.handle(messages.AbortClient(client)),
        ]
        self.rng.shuffle(told)
        for tell in told:
            tell()
        self.forget([name for name, (_, o) in self.requests.items() if o["client"] == client])

    def lose_detokenizer(self):
        self.engine.lose_detokenizer()
        self.forget(self.requests)

    def reset(self):
        self.reader.epoch += 1
        self.engine.handle(messages.ResetPrefixCache(0, f"reset {self.reader.epoch}"))

    def ping(self):
        self.num_pings += 1
        self.engine.handle(messages.Ping(9, self.num_pings))

    # --- what has become of it --------------------------------------------------------------------

    def check_ends(self):
        """Nothing is held, and each choice has ended once, for its reason."""
        engine = self.engine
        engine.assert_idle()
        opened = Counter((one.request_id, one.incarnation) for one in engine.opened.values())
        assert opened == self.choices
        assert [ping.number for ping in engine.pings] == list(range(1, self.num_pings + 1))
        assert len(engine.resets) == self.reader.epoch
        assert self.model is None or not self.model.choices
        assert self.model is None or self.model.preemptions == self.planner.preemptions
        for stream in engine.opened:
            self.check_end(stream)

    def check_end(self, stream):
        opened, (end,) = self.engine.opened[stream], self.engine.ends[stream]
        params, tokens = opened.params, self.engine.tokens[stream][: end.num_tokens]
        stop_ids = self.stop_ids(params.stop_token_ids, params.ignore_eos)
        places = [place for place, token in enumerate(tokens, 1) if token in stop_ids]
        places = [place for place in places if place >= params.min_tokens]
        longest = min(params.max_tokens or PLENTY, self.most - opened.num_prompt_tokens)
        refused = opened.request_id in self.refused
        assert (end.reason == "error") <= refused
        if end.reason == "abort":
            assert opened.request_id in self.aborted
        elif end.reason == "length":
            assert (places, end.num_tokens) == ([], longest)
        elif end.reason == "stop" and end.num_tokens != self.stopped.get(stream):
            assert places == [end.num_tokens]
        assert end.num_tokens <= (0 if refused else longest)


def soak(make_engine, model_spec, seeds, num_steps):
    totals = Counter()
    for seed in seeds:
        run = Soak(make_engine, model_spec, seed)
        try:
            totals.update(run.run(num_steps))
        except Exception as error:
            steps = run.core.statistics()["steps"]
            error.add_note(f"seed {seed}, in or after step {steps}: {run.config}, {run.windows}")
            raise
    return totals


@pytest.mark.parametrize("batch", range(8))
def test_random_engines(make_engine, model_spec, batch):
    totals = soak(make_engine, model_spec, range(6 * batch, 6 * batch + 6), num_steps=380)
    assert totals["steps"] > 2500
    for name in ("preemptions", "forks", "chunked_prefills", "mixed_steps", "prefix_cache_hits"):
        assert totals[name] > 0, name
    assert totals["overshoot_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(40))
def test_many_more_random_engines(make_engine, model_spec, batch):
    soak(make_engine, model_spec, range(1000 + 10 * batch, 1010 + 10 * batch), num_steps=800)

"""A scheduler core and a fake worker in one loop, with the bookkeeping of a detokenizer."""

from collections import defaultdict

import pytest

from ringcast.actors.core import PeerLost
from ringcast.actors.scheduler.core import SchedulerCore
from ringcast.executor.fake_runner import FakeModelRunner, expected_tokens
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.sampling_params import SamplingParams


def make_spec(**changes):
    options = {
        "name": "fake",
        "path": "",
        "tokenizer_path": "",
        "architecture": "Fake",
        "vocab_size": 1000,
        "max_model_len": 512,
        "eos_token_ids": [2],
        "hf_config": {},
    }
    return ModelSpec(**{**options, **changes})


class Engine:
    """Drives one core. `opened`, `ends` and `tokens` are what the detokenizer heard, by stream.

    `tokens` begin with those that were resumed. `lost` are streams whose ends nobody will hear.
    """

    def __init__(self, spec=None, ready=True, **options):
        defaults = {
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_steps_in_flight": 1,
        }
        self.config = EngineConfig(**{**defaults, **options})
        self.spec = spec or make_spec()
        self.core = SchedulerCore(self.config, self.spec)
        # Its fake tokens may be EOS ids of the scheduler's.
        self.worker_spec = make_spec(hf_config=self.spec.hf_config)
        self.runner = FakeModelRunner(self.config, self.worker_spec)
        self.outputs = []  # of the worker, not yet handed to the core
        self.plans = []
        self.stream_steps = []
        self.prompts = {}  # by request id
        self.opened = {}
        self.num_cached = {}
        self.now = 0.0
        self.lost = set()
        self.pings = []
        self.resets = []
        self.ends = defaultdict(list)
        self.tokens = defaultdict(list)
        if ready:
            self.worker_ready()

    def worker_ready(self):
        self.handle(self.runner.load(lambda *_: None), "worker.0")

    def handle(self, message, source="tokenizer.0"):
        assert list(self.core.handle(source, message, self.now)) == []

    def add(
        self,
        request_id,
        prompt,
        incarnation=0,
        cache_salt="",
        client=0,
        resume=None,
        priority=0,
        **params,
    ):
        """resume: the output so far of each choice that goes on."""
        params = SamplingParams(seed=0, **{"max_tokens": 8, **params})
        self.prompts[request_id, incarnation] = list(prompt)
        resumes = (resume or {}).items()
        self.handle(
            messages.AddRequest(
                request_id,
                incarnation,
                codec.pack(prompt),
                params,
                messages.OutputSpec(client),
                0.0,
                cache_salt,
                resume=[messages.Resume(choice, codec.pack(output)) for choice, output in resumes],
                priority=priority,
            )
        )

    def abort(self, request_id, incarnation=0):
        self.handle(messages.AbortRequest(request_id, incarnation))

    def lose_detokenizer(self):
        """It dies with all it knew, and another one comes."""
        self.handle(PeerLost(), "detokenizer.0")

    def restart(self):
        """Scheduler and worker die, and others come."""
        self.lost |= {stream for stream in self.opened if not self.ends[stream]}
        old = self.core
        self.core = SchedulerCore(self.config, self.spec)
        self.core._last_stream = old._last_stream  # so that `opened` can tell them apart
        self.runner = FakeModelRunner(self.config, self.worker_spec)
        self.outputs.clear()
        self.worker_ready()

    def stop(self, stream, num_tokens):
        self.handle(messages.StopStream(stream, num_tokens), "detokenizer.0")

    def flush(self):
        """Everything that the core sends, to where it goes; the worker executes a plan at once."""
        sends = self.core.flush(0.0)
        kinds = [(send.to, type(send.message)) for send in sends]
        assert kinds.count(("workers", messages.StepPlan)) <= self.config.most_steps_in_flight
        assert kinds.count(("detokenizer.0", messages.StreamStep)) <= 1
        decode_plan = codec.Decoder(messages.SchedulerToWorker)
        decode_stream = codec.Decoder(messages.SchedulerToDetokenizer)
        for send in sends:
            payload = codec.encode(send.message)
            if send.to == "workers":
                plan = decode_plan(payload)
                self.plans.append(plan)
                self.outputs.append(self.runner.execute(plan))
            else:
                self._hear(decode_stream(payload))
        assert self.core.num_steps_in_flight <= self.config.most_steps_in_flight
        self.core.check()
        return sends

    def answer(self):
        """The oldest step's output comes back."""
        self.handle(self.outputs.pop(0), "worker.0")

    def step(self):
        """One round: an output comes back if one is due, and the core flushes."""
        if self.outputs:
            self.answer()
        self.flush()

    def run(self, most=10_000):
        for _ in range(most):
            self.step()
            if not self.core.num_unfinished and not self.outputs:
                return
        raise AssertionError(f"not at rest after {most} steps: {self.core.statistics()}")

    def stream(self, request_id, choice=0, incarnation=0):
        return next(
            stream
            for stream, message in self.opened.items()
            if (message.request_id, message.choice, message.incarnation)
            == (request_id, choice, incarnation)
        )

    def output(self, request_id, choice=0, incarnation=0):
        """The tokens that count."""
        stream = self.stream(request_id, choice, incarnation)
        return self.tokens[stream][: self.end(request_id, choice, incarnation).num_tokens]

    def end(self, request_id, choice=0, incarnation=0):
        (end,) = self.ends[self.stream(request_id, choice, incarnation)]
        return end

    def cached(self, request_id, choice=0):
        return self.num_cached.get(self.stream(request_id, choice), 0)

    def expected(self, request_id, choice=0, num_tokens=8, incarnation=0):
        prompt = self.prompts[request_id, incarnation]
        return expected_tokens(prompt, choice, num_tokens, self.worker_spec)

    def assert_idle(self):
        """Every stream has ended once, each with the tokens it should have, and nothing is held."""
        self.core.check()
        assert self.core.num_unfinished == 0
        statistics = self.core.statistics()
        assert statistics["free_blocks"] == statistics["num_blocks"] - 1
        for stream, opened in self.opened.items():
            tokens = self.tokens[stream]
            if stream in self.lost:
                assert not self.ends[stream]
            else:
                (end,) = self.ends[stream]
                assert len(tokens) >= end.num_tokens
            request, choice = (opened.request_id, opened.incarnation), opened.choice
            wanted = expected_tokens(
                self.prompts[request] or [0], choice, len(tokens), self.worker_spec
            )
            assert tokens == wanted, (request, choice)

    def _hear(self, message):
        if isinstance(message, messages.OpenStream):
            assert message.stream not in self.opened
            self.opened[message.stream] = message
            self.tokens[message.stream] += codec.ints(message.resumed).tolist()
            return
        if isinstance(message, messages.Ping):
            self.pings.append(message)
            return
        if isinstance(message, messages.ResetPrefixCache):
            self.resets.append(message)
            return
        self.stream_steps.append(message)
        streams = codec.longs(message.streams).tolist()
        index, tokens = (
            codec.ints(field).tolist() for field in (message.token_index, message.token_ids)
        )
        for stream, place, token in zip(streams, index, tokens, strict=True):
            assert stream in self.opened
            assert not self.ends[stream]
            assert stream not in self.lost
            assert place == len(self.tokens[stream])
            self.tokens[stream].append(token)
        for stream, num_cached in message.cached:
            assert stream in streams
            self.num_cached[stream] = num_cached
        for end in message.ends:
            assert end.stream not in self.lost
            self.ends[end.stream].append(end)


@pytest.fixture
def make_engine():
    return Engine


@pytest.fixture
def model_spec():
    return make_spec

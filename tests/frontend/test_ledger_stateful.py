"""The ledger against a model of the engine behind it, which dies and comes back part by part.

The model has the queues that the channels are (so that late words of older incarnations arrive),
and a scheduler that takes newer incarnations for older ones. Token `i` of a choice is
`1000 * choice + i`. A rendered event is the packed tokens since the last one.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from no_model import SPEC

from ringcast.frontend.client import EngineClient
from ringcast.frontend.handle import PROOF_TOKENS, RequestHandle
from ringcast.frontend.mailbox import Mailbox
from ringcast.mq import codec
from ringcast.mq.errors import PoisonousRequestError, RingcastError
from ringcast.mq.messages import (
    Abort,
    Accepted,
    Chunk,
    Chunks,
    ErrorInfo,
    Finish,
    Generate,
    OutputSpec,
    Rejected,
    TextPrompt,
    TokensPrompt,
)
from ringcast.mq.sampling_params import SamplingParams

UNITS = {
    "tokenizer": ["tokenizer.0"],
    "detokenizer": ["detokenizer.0"],
    "engine": ["worker.0", "scheduler.0"],
}
OUTPUTS = {
    "raw": None,
    "raw deltas": OutputSpec(client=0, delta=True),
    "chat": OutputSpec(client=0, form="chat", delta=True),
}
BAD = TextPrompt("refused")


def tokens(choice: int, begin: int, end: int) -> bytes:
    return codec.pack(range(1000 * choice + begin, 1000 * choice + end))


class Reader(Mailbox):
    """Checks at every chunk that its choice goes on where it was, and that nothing comes twice."""

    def __init__(self, rendered: bool, lengths: list[int]) -> None:
        super().__init__()
        self.rendered = rendered
        self.lengths = lengths
        self.shown = [b""] * len(lengths)
        self.finishes: list[Finish | None] = [None] * len(lengths)
        self.num_ends = 0
        self.error: RingcastError | None = None

    def put(self, chunk: Chunk) -> None:
        assert not self.num_ends
        choice = chunk.choice
        assert self.finishes[choice] is None
        self.shown[choice] += chunk.data if self.rendered else chunk.token_ids
        length = len(self.shown[choice]) // 4
        assert self.shown[choice] == tokens(choice, 0, length)
        self.finishes[choice] = chunk.finish
        if chunk.finish is not None and chunk.finish.reason == "stop":
            assert length == chunk.finish.num_output_tokens == self.lengths[choice]

    def close_one(self, error: RingcastError | None = None) -> None:
        self.num_ends += 1
        self.error = error
        assert self.num_ends == 1
        assert error is not None or all(self.finishes)

    @property
    def marks(self) -> list[int]:
        """By choice, the tokens shown, and many more once it has ended."""
        pairs = zip(self.shown, self.finishes, strict=True)
        return [len(shown) // 4 + 1000 * (finish is not None) for shown, finish in pairs]


@dataclasses.dataclass(eq=False)
class Asked:
    """A request as the test knows it. hits: the deaths of `hit_with` that it may have caused.

    when_sent: the reader's marks at that time. at_large: parked by a death of the tokenizer alone.
    """

    handle: RequestHandle
    reader: Reader
    when_sent: list[int] = dataclasses.field(default_factory=list)
    at_large: bool = False
    hits: float = 0
    hit_with: str = ""

    @property
    def proven(self) -> bool:
        before = self.when_sent or [0] * len(self.reader.shown)
        marks = self.reader.marks
        return any(now - was >= PROOF_TOKENS for now, was in zip(marks, before, strict=True))


@dataclasses.dataclass(eq=False)
class Running:
    """A request in the model's scheduler. dark: the detokenizer doesn't know it."""

    request: Generate
    dark: bool
    made: dict[int, int]  # by open choice, how many tokens
    shown: dict[int, int]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.client = EngineClient(SPEC, self.send)
        self.down: set[str] = set()
        self.to_tokenizer: deque[Any] = deque()
        self.to_scheduler: deque[Any] = deque()
        self.from_tokenizer: deque[Any] = deque()
        self.from_detokenizer: deque[Chunk] = deque()
        self.running: dict[str, Running] = {}
        self.asked: dict[str, Asked] = {}
        self.said: list[Chunk] = []
        self.lost_aborts: set[str] = set()

    def send(self, to: str, message: Any) -> None:
        assert to == "tokenizer.0"
        assert not self.down, f"{message} was sent while {self.down} is down"
        self.to_tokenizer.append(message)
        if isinstance(message, Generate) and message.incarnation:
            asked = self.asked[message.request_id]
            reader = asked.reader
            assert asked.handle.open
            assert not asked.handle.aborting
            left = [choice for choice, finish in enumerate(reader.finishes) if finish is None]
            assert [one.choice for one in message.resume] == (left if any(reader.marks) else [])
            asked.when_sent, asked.at_large = reader.marks, False

    # --- what callers do

    @precondition(lambda self: self.client.num_open < 6)
    @rule(
        output=st.sampled_from(list(OUTPUTS)),
        lengths=st.lists(st.integers(1, 25), min_size=1, max_size=3),
        bad=st.integers(0, 9),
    )
    def submit(self, output: str, lengths: list[int], bad: int) -> None:
        reader = Reader(output == "chat", lengths)
        handle = self.client.submit(
            BAD if bad == 0 else TextPrompt("hi"),
            SamplingParams(n=len(lengths)),
            OUTPUTS[output],
            mailbox=reader,
        )
        self.asked[handle.request_id] = Asked(handle, reader)

    @precondition(lambda self: self.client.num_open)
    @rule(number=st.integers(0), meant=st.sampled_from([False, False, True]))
    def abort(self, number: int, meant: bool) -> None:
        handles = [asked.handle for asked in self.asked.values() if asked.handle.open]
        if meant:
            handles[number % len(handles)].abort()

    # --- what the engine does

    @precondition(lambda self: self.to_tokenizer and "tokenizer" not in self.down)
    @rule()
    def tokenize(self, forward: bool = True) -> None:
        message = self.to_tokenizer.popleft()
        if not forward and isinstance(message, Abort):
            self.lost_aborts.add(message.request_id)
        if isinstance(message, Generate):
            name, incarnation = message.request_id, message.incarnation
            if message.prompt == BAD:
                info = ErrorInfo("refused")
                self.from_tokenizer.append(Rejected(name, incarnation, info))
                return
            ids = codec.pack([1, 2])
            assert message.prompt in (TextPrompt("hi"), TokensPrompt(ids))
            self.from_tokenizer.append(Accepted(name, incarnation, ids))
        if forward and "engine" not in self.down:
            self.to_scheduler.append(message)

    @precondition(lambda self: self.to_scheduler)
    @rule()
    def schedule(self) -> None:
        message = self.to_scheduler.popleft()
        old = self.running.get(message.request_id)
        if isinstance(message, Abort):
            if old is not None and old.request.incarnation <= message.incarnation:
                del self.running[message.request_id]
                for choice in old.made:
                    self.say(old, choice, "abort")
        elif old is None or old.request.incarnation < message.incarnation:
            made = dict.fromkeys(range(message.params.n), 0)
            if message.resume:
                made = {one.choice: len(one.token_ids) // 4 for one in message.resume}
            for one in message.resume:
                assert one.token_ids == tokens(one.choice, 0, made[one.choice])
            dark = "detokenizer" in self.down
            self.running[message.request_id] = Running(message, dark, made, dict(made))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0), count=st.sampled_from([0, 1, 2, 9]), visible=st.booleans())
    def speak(self, number: int, count: int, visible: bool) -> None:
        choices = [
            (running, choice) for running in self.running.values() for choice in running.made
        ]
        self.go_on(*choices[number % len(choices)], count, visible)

    def go_on(self, running: Running, choice: int, count: int, visible: bool) -> None:
        """A choice gets more tokens, and ends when it has all that it should have."""
        first, length = running.made[choice], self.length(running, choice)
        running.made[choice] = min(first + count, length)
        if running.made[choice] == length:
            self.say(running, choice, "stop", first)
            del running.made[choice]
            if not running.made:
                del self.running[running.request.request_id]
        elif running.made[choice] > first:
            self.say(running, choice, None, first, visible)

    def say(
        self,
        running: Running,
        choice: int,
        reason: Any,
        first: int | None = None,
        visible: bool = True,
    ) -> None:
        request, made = running.request, running.made[choice]
        first = made if first is None else first
        data = b""
        if request.output.form == "chat" and visible and reason != "abort":
            data = tokens(choice, running.shown[choice], made)
            running.shown[choice] = made
        chunk = Chunk(
            request.request_id,
            request.incarnation,
            choice,
            first,
            tokens(choice, first, made),
            data=data,
            finish=None if reason is None else Finish(reason, 2, made),
        )
        if not running.dark:
            self.from_detokenizer.append(chunk)

    def length(self, running: Running, choice: int) -> int:
        return self.asked[running.request.request_id].reader.lengths[choice]

    @precondition(lambda self: self.from_tokenizer or self.from_detokenizer)
    @rule(count=st.integers(1, 4), split=st.booleans())
    def hear(self, count: int, split: bool) -> None:
        while self.from_tokenizer:
            self.client.deliver("tokenizer.0", self.from_tokenizer.popleft())
        chunks = [self.from_detokenizer.popleft() for _ in range(count) if self.from_detokenizer]
        self.said += chunks
        for batch in [[chunk] for chunk in chunks] if split else [chunks]:
            self.client.deliver("detokenizer.0", Chunks(batch))

    @rule(
        counts=st.lists(st.sampled_from([0, 1, 2, 9]), min_size=1, max_size=3),
        visible=st.booleans(),
    )
    def serve(self, counts: list[int], visible: bool) -> None:
        """A step in peace: all that is under way arrives, and what runs goes on."""
        self.flow()
        for i, running in enumerate(list(self.running.values())):
            for choice in list(running.made):
                self.go_on(running, choice, counts[(i + choice) % len(counts)], visible)
        self.flow()

    def flow(self) -> None:
        while self.to_tokenizer and "tokenizer" not in self.down:
            self.tokenize()
        while self.to_scheduler:
            self.schedule()
        while self.from_tokenizer or self.from_detokenizer:
            self.hear(4, False)

    @precondition(lambda self: self.said)
    @rule(number=st.integers(0))
    def hear_again(self, number: int) -> None:
        chunk = self.said[number % len(self.said)]
        self.client.deliver("detokenizer.0", Chunks([chunk]))

    # --- what the supervisor does

    @precondition(lambda self: self.client.num_open)
    @rule(
        unit=st.sampled_from(list(UNITS)),
        half=st.booleans(),
        num_unsaid=st.integers(0, 2),
        aborts=st.lists(st.integers(0), max_size=2),
        weight=st.sampled_from([1, 0.5]),
    )
    def lose(
        self, unit: str, half: bool, num_unsaid: int, aborts: list[int], weight: float
    ) -> None:
        """half: between Accepted and AddRequest. num_unsaid: chunks the detokenizer never sent.

        aborts: of requests, just before. weight: of the strike; less if it came from outside.
        """
        if unit in self.down:
            return
        for number in aborts:
            self.abort(number, bool(self.client.num_open))
        if unit == "tokenizer":
            if half and self.to_tokenizer:
                self.tokenize(forward=False)
            self.lose_what_the_tokenizer_has()
        elif unit == "engine":
            self.running.clear()
            self.to_scheduler.clear()
        else:
            self.running.clear()
            for _ in range(min(num_unsaid, len(self.from_detokenizer))):
                self.from_detokenizer.pop()
        if unit != "engine":
            self.hear(len(self.from_detokenizer) if unit == "detokenizer" else 0, False)
        self.down.add(unit)
        out = [a for a in self.asked.values() if a.handle.open and not a.handle.parked]
        self.count_hits(unit, weight)
        self.client.lost(UNITS[unit], f"{unit} died", weight < 1)
        for asked in self.asked.values():
            asked.at_large = unit == "tokenizer" and (asked in out or asked.at_large)
            asked.at_large &= asked.handle.parked
        for asked in self.asked.values():
            if asked.hits >= 2:
                assert isinstance(asked.reader.error, PoisonousRequestError)
            else:
                assert not isinstance(asked.reader.error, PoisonousRequestError)

    def lose_what_the_tokenizer_has(self) -> None:
        for message in self.to_tokenizer:
            if isinstance(message, Abort):
                self.lost_aborts.add(message.request_id)
        self.to_tokenizer.clear()

    def count_hits(self, unit: str, weight: float) -> None:
        for asked in self.asked.values():
            handle = asked.handle
            sent = handle.open and not handle.parked and not handle.aborting
            at_large = handle.open and asked.at_large and unit != "tokenizer"
            if (sent or at_large) and not (unit == "tokenizer" and handle.accepted):
                again = asked.hit_with == unit and not asked.proven
                asked.hits, asked.hit_with = asked.hits + weight if again else weight, unit

    @precondition(lambda self: self.down)
    @rule(number=st.integers(0, 2))
    def regain(self, number: int) -> None:
        self.come_back(sorted(self.down)[number % len(self.down)])

    def come_back(self, unit: str) -> None:
        self.down.discard(unit)
        if unit == "detokenizer":
            for running in self.running.values():
                assert running.dark
        self.client.regained(UNITS[unit])

    # --- what is always so

    @invariant()
    def one_striker_at_most_is_out_and_unproven(self) -> None:
        out = [
            asked
            for asked in self.asked.values()
            if asked.handle.open and not asked.handle.parked and asked.hits >= 1
        ]
        assert sum(not asked.proven for asked in out) <= 1

    @invariant()
    def what_has_ended_is_not_in_the_ledger(self) -> None:
        ended = sum(asked.reader.num_ends for asked in self.asked.values())
        assert self.client.num_open == len(self.asked) - ended

    @initialize(down=st.lists(st.sampled_from(list(UNITS)), max_size=1))
    def begin(self, down: list[str]) -> None:
        for unit in down:
            self.lose(unit, False, 0, [], 1)

    def teardown(self) -> None:
        for unit in sorted(self.down):
            self.come_back(unit)
        self.flow()
        for name in self.running:
            assert self.asked[name].handle.open or name in self.lost_aborts, "nobody aborted it"
        rounds = 0
        while self.to_tokenizer or self.running or self.client.num_open:
            rounds += 1
            assert rounds <= 2 + len(self.asked), "something never ends"
            self.flow()
            for running in list(self.running.values()):
                for choice in list(running.made):
                    self.go_on(running, choice, 25, True)
            self.flow()
        assert all(asked.reader.num_ends == 1 for asked in self.asked.values())
        statistics = self.client.statistics()
        assert (statistics["open"], statistics["parked"]) == (0, 0)
        assert statistics["poisoned"] == sum(asked.hits >= 2 for asked in self.asked.values())


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
test_the_ledger_against_a_model = Machine.TestCase

"""The router's scores, and what it remembers of prompts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcast.frontend.prefix_memory import BLOCK_BYTES, MOST_BLOCKS, PrefixMemory, block_names
from ringcast.frontend.routing import Router
from ringcast.mq import codec
from ringcast.mq.messages import (
    ChatPrompt,
    Generate,
    Loads,
    OutputSpec,
    TextPrompt,
    TokensPrompt,
)
from ringcast.mq.sampling_params import SamplingParams


@dataclasses.dataclass
class Request:
    engine: int
    num_out: int
    counted: tuple[int, int] = (0, 0)


def ask(text: str = "") -> Generate:
    return Generate("r", 0, TextPrompt(text), SamplingParams(), OutputSpec(0), 0.0)


def loads(waiting: list[int], running: list[int], ours: list[int], num_clients: int = 1) -> Loads:
    counts = [codec.pack(values) for values in (waiting, running, ours)]
    return Loads(*counts, b"", num_clients)


def test_a_score_is_four_times_what_waits_and_what_runs() -> None:
    router = Router(3)
    router.publish(loads([0, 2, 1], [7, 0, 3], [0, 0, 0]))
    assert router.scores().tolist() == [7, 8, 7]


def test_own_requests_are_corrected_by_what_was_published_of_them() -> None:
    router = Router(2)
    requests = [Request(engine=0, num_out=2), Request(engine=1, num_out=1)]
    for request in requests:
        router.track(request)
    assert router.scores().tolist() == [8, 4]  # nothing is published yet: all of them wait
    router.publish(loads([0, 0], [2, 1], [2, 1]))
    assert router.scores().tolist() == [2, 1]
    requests[0].num_out = 0
    router.track(requests[0])
    assert router.scores().tolist() == [0, 1]
    requests[1].engine = 0  # handed over
    router.track(requests[1])
    assert router.scores().tolist() == [1, 0]


def test_other_clients_are_taken_to_do_alike() -> None:
    router = Router(2)
    router.publish(loads([0, 0], [5, 9], [0, 0], num_clients=3))
    router.track(Request(engine=0, num_out=1))
    assert router.scores().tolist() == [5 + 4 * 3, 9]


def test_the_unknown_and_the_dead_keep_what_was_known() -> None:
    router = Router(3)
    router.publish(loads([0, 0, 0], [5, 6, 7], [0, 0, 0]))
    router.lose(2)
    router.publish(loads([-1, 0, 0], [-1, 1, 7], [0, 0, 0]))
    assert router.scores().tolist()[:2] == [5, 1]
    assert [router.choose(ask()) for _ in range(2)] == [1, 1]
    router.regain(2)
    assert router.choose(ask()) == 2


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9), st.integers(0, 20), st.data())
def test_the_least_loaded_live_one_is_chosen(running: list[int], index: int, data: st.DataObject):
    router = Router(len(running), index)
    router.publish(loads([0] * len(running), running, [0] * len(running)))
    dead = data.draw(st.sets(st.integers(0, len(running) - 1), max_size=len(running) - 1))
    for engine in dead:
        router.lose(engine)
    chosen = router.choose(ask())
    least = min(n for engine, n in enumerate(running) if engine not in dead)
    assert chosen not in dead
    assert running[chosen] == least


def test_equals_take_turns() -> None:
    router = Router(4, index=6)
    assert [router.choose(ask()) for _ in range(5)] == [2, 3, 0, 1, 2]


PROMPTS = [
    lambda data: TokensPrompt(data),
    lambda data: TextPrompt(data.decode("latin-1").replace("\x80", "a")),
    lambda data: ChatPrompt(data),
]


@pytest.mark.parametrize("make", PROMPTS)
def test_prompts_that_begin_alike_share_their_first_names(make) -> None:
    stem = b"x" * 3 * BLOCK_BYTES
    one, two = (block_names(make(stem + end * BLOCK_BYTES)) for end in (b"1", b"2"))
    assert len(one) == len(two) == 4
    assert one[:3] == two[:3]
    assert one[3] != two[3]
    assert len(set(one)) == 4


def test_names_are_of_whole_blocks_and_of_the_beginning_only() -> None:
    assert block_names(TextPrompt("x" * (BLOCK_BYTES - 1))) == []
    assert len(block_names(TextPrompt("é\ud800" * 100_000))) == MOST_BLOCKS


def test_a_salt_makes_other_names() -> None:
    prompt = TextPrompt("x" * BLOCK_BYTES)
    assert block_names(prompt) == block_names(prompt, "")
    assert block_names(prompt) != block_names(prompt, "salt")


def test_a_chats_tools_come_first() -> None:
    tools, said = b"t" * BLOCK_BYTES, b"m" * BLOCK_BYTES
    one, two = block_names(ChatPrompt(said, tools=tools)), block_names(ChatPrompt(b"", tools=tools))
    assert one[:1] == two


def test_each_replica_holds_what_went_there() -> None:
    memory = PrefixMemory(4)
    names = [bytes([i]) for i in range(5)]
    memory.note(names[:2], 0)
    memory.note(names, 1)
    memory.note(names[1:], 2)  # without the first, the others are of no use
    assert memory.held(names).tolist() == [2, 5, 0, 0]
    assert memory.held(names[:1]).tolist() == [1, 1, 0, 0]
    assert memory.held([]).tolist() == [0, 0, 0, 0]
    memory.forget(1)
    assert memory.held(names).tolist() == [2, 0, 0, 0]
    memory.clear()
    assert memory.held(names).tolist() == [0, 0, 0, 0]


def test_the_oldest_names_are_forgotten() -> None:
    memory = PrefixMemory(1, most=3)
    memory.note([b"a", b"b"], 0)
    memory.note([b"c"], 0)
    memory.note([b"a"], 0)
    memory.note([b"d"], 0)
    assert len(memory) == 3
    assert [memory.held([name]).tolist() for name in (b"a", b"b", b"c", b"d")] == [
        [1],
        [0],
        [1],
        [1],
    ]


def test_of_a_prompt_its_last_names_are_forgotten_first() -> None:
    """Without the first ones the others are of no use."""
    memory = PrefixMemory(1, most=3)
    memory.note([b"a", b"b", b"c"], 0)
    memory.note([b"d"], 0)
    assert memory.held([b"a", b"b", b"c"]).tolist() == [2]


def test_a_new_replica_gets_its_share_and_one_that_leaves_nothing() -> None:
    router = Router(1, policy="prefix")
    router.regain(2)
    assert (router.num_engines, router.live) == (3, [0, 2])
    router.publish(loads([0, 0, 0, 0], [5, 0, 1, 0], [0, 0, 0, 0]))  # one that isn't known yet
    assert router.scores()[[0, 2]].tolist() == [5, 1]
    assert router.choose(ask("x" * 1000)) == 2
    router.publish(loads([0], [0], [0]))  # by one that knows fewer
    assert router.scores()[[0, 2]].tolist() == [0, 1]
    router.leave(2)
    assert (router.is_live(2), router.is_open(2), router.any_open) == (True, False, True)
    assert router.choose(ask("x" * 1000)) == 0
    router.lose(2)
    router.regain(2)
    assert router.is_open(2)

"""Streams whose output is parsed: special tokens, stop strings, events, takeovers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from actors.text.streams import packed_streams
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ringcast.actors.text.detokenizer_core import DetokenizerCore
from ringcast.actors.text.logprob_rows import LogprobRow, pack_rows
from ringcast.actors.text.parsers import REASONING_PARSERS, TOOL_PARSERS
from ringcast.actors.text.parsers.output_parser import parse_output
from ringcast.actors.text.text_tokenizer import TextTokenizer
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.messages import (
    Chunk,
    OpenStream,
    OutputSpec,
    ParserSpec,
    StopStream,
    StreamEnd,
    StreamStep,
)
from ringcast.mq.sampling_params import SamplingParams

MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "<|im_end|>",
    "<pad>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
]
CALL = '{"name": "f", "arguments": {"a": "é🦊"}}'
TEXT = f"<think>Hm.</think>Yes <pad>so<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}"
BOTH = ParserSpec("hermes", "qwen3")
XML = "<function=f><parameter=a>1</parameter></function>"
FENCED = 'f\n```json\n{"a": 1}\n```'
DEEPSEEK = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{FENCED}<｜tool▁call▁end｜>"


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    """Every byte is a token, and every mark a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return TextTokenizer(backend)


class Player:
    """Plays choices to a core, a flush after each group of tokens."""

    def __init__(self, spec: ModelSpec, tokenizer: TextTokenizer) -> None:
        self.core = DetokenizerCore(spec, tokenizer)
        self.stops: list[StopStream] = []

    def play(
        self,
        tokens: Sequence[int],
        parsers: ParserSpec | None = BOTH,
        groups: Sequence[int] = (),
        num_resumed: int = 0,
        form: Any = "chat",
        **params: Any,
    ) -> list[Chunk]:
        output = OutputSpec(
            0, form, form == "chat", "id", "tiny", 1, index_offset=2, parsers=parsers
        )
        sampling = SamplingParams(max_tokens=None, **params)
        resumed = codec.pack(tokens[:num_resumed])
        opened = OpenStream(5, "r", min(num_resumed, 1), 1, 4, sampling, output, resumed)
        self.core.handle("scheduler.0", opened, 0.0)
        chunks = self._flush()
        sizes = iter([*groups, *[1] * len(tokens)])
        place = num_resumed
        while place < len(tokens):
            size = next(sizes)
            for index, token in list(enumerate(tokens))[place : place + size]:
                arrays = (packed_streams([5]), codec.pack([index]), codec.pack([token]))
                logprobs = None
                if sampling.logprobs is not None:
                    logprobs, _ = pack_rows([LogprobRow(0, 1, [token], [-0.5], [None])], 0)
                self.core.handle("scheduler.0", StreamStep(*arrays, [], logprobs), 0.0)
            place += size
            chunks += self._flush()
        end = StreamEnd(5, "length", len(tokens))
        self.core.handle("scheduler.0", StreamStep(b"", b"", b"", [end]), 0.0)
        return chunks + self._flush()

    def _flush(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for send in self.core.flush(0.0):
            if isinstance(send.message, StopStream):
                self.stops.append(send.message)
            else:
                chunks += send.message.chunks
        return chunks


@pytest.fixture
def player(spec: ModelSpec, tokenizer: TextTokenizer) -> Player:
    return Player(spec, tokenizer)


def events_of(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    data = b"".join(chunk.data for chunk in chunks).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in data.split("\n\n") if line]
    choices = [event["choices"][0] for event in events]
    assert {choice["index"] for choice in choices} <= {3}
    return choices


def said(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """What a client puts together of a stream."""
    choices = events_of(chunks)
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    for place, choice in enumerate(choices):
        delta = choice["delta"]
        assert ("role" in delta) == (place == 0)
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", []):
            call = calls.setdefault(part["index"], [part.get("id"), "", ""])
            call[1] += part["function"].get("name", "")
            call[2] += part["function"]["arguments"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return {
        "content": content,
        "reasoning": reasoning,
        "calls": list(calls.values()),
        "reason": reasons[-1],
        "stop_reason": choices[-1].get("stop_reason"),
    }


def expected(text: str, parsers: ParserSpec, reason: str = "length", stop: Any = None) -> Any:
    output = parse_output(text, parsers, "r", 1)
    return {
        "content": output.content,
        "reasoning": output.reasoning,
        "calls": [[call.id, call.name, call.arguments] for call in output.tool_calls],
        "reason": "tool_calls" if output.tool_calls else reason,
        "stop_reason": stop,
    }


def test_marks_are_seen_and_other_special_tokens_left_out(
    player: Player, tokenizer: TextTokenizer
) -> None:
    got = said(player.play(tokenizer.encode(TEXT)))
    assert got == expected(TEXT.replace("<pad>", ""), BOTH)
    assert (got["content"], got["reasoning"], got["reason"]) == ("Yes so", "Hm.", "tool_calls")
    assert [call[1:] for call in got["calls"]] == [["f", '{"a": "é🦊"}']] * 2


def test_marks_of_other_parsers_are_left_out(player: Player, tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode("<think>[TOOL_CALLS]a</think><tool_call>")
    assert said(player.play(tokens, ParserSpec("mistral")))["content"] == "[TOOL_CALLS]a"
    assert said(player.play(tokens, ParserSpec("pythonic")))["content"] == "a"
    assert said(player.play(tokens, ParserSpec(reasoning="qwen3")))["reasoning"] == "a"


@pytest.mark.parametrize(
    ("parser", "text"),
    [("deepseek_v3", DEEPSEEK), ("qwen3_coder", f"<tool_call>{XML}</tool_call>")],
)
def test_calls_of_other_parsers(
    player: Player, tokenizer: TextTokenizer, parser: str, text: str
) -> None:
    got = said(player.play(tokenizer.encode(f"Yes{text}<pad>"), ParserSpec(parser)))
    assert got["content"] == "Yes"
    assert [call[1] for call in got["calls"]] == ["f"]
    assert got["reason"] == "tool_calls"


def test_all_special_tokens_stay_where_asked_for(player: Player, tokenizer: TextTokenizer) -> None:
    got = said(player.play(tokenizer.encode(TEXT), skip_special_tokens=False))
    assert got["content"] == "Yes <pad>so"


def test_the_text_of_what_is_not_rendered_is_left_to_the_client(
    player: Player, tokenizer: TextTokenizer
) -> None:
    tokens = tokenizer.encode(TEXT)
    text = "".join(chunk.text for chunk in player.play(tokens, form="raw"))
    assert text == TEXT.replace("<pad>", "")
    (none,) = {chunk.data for chunk in player.play(tokens, form="raw")}
    assert none == b""


@pytest.mark.parametrize("form", ["chat", "raw"])
def test_reasoning_that_the_prompt_has_opened(
    player: Player, tokenizer: TextTokenizer, form: str
) -> None:
    spec = ParserSpec(reasoning="qwen3", thinking=True)
    tokens = tokenizer.encode("Hm.</think>Yes")
    chunks = player.play(tokens, spec, form=form)
    if form == "raw":
        assert "".join(chunk.text for chunk in chunks) == "<think>Hm.</think>Yes"
        rest = player.play(tokens, spec, form=form, num_resumed=3)
        assert "".join(chunk.text for chunk in rest) == "</think>Yes"
    else:
        assert said(chunks)["reasoning"] == "Hm."
        assert said(chunks)["content"] == "Yes"


def test_a_stop_string_ends_a_call_that_is_then_none(
    player: Player, tokenizer: TextTokenizer
) -> None:
    got = said(player.play(tokenizer.encode(TEXT), stop=("🦊",)))
    text = TEXT.replace("<pad>", "").partition("🦊")[0]
    assert got == expected(text, BOTH, "stop", "🦊")
    assert got["content"].endswith('"arguments": {"a": "é')
    assert len(player.stops) == 1
    got = said(player.play(tokenizer.encode(TEXT), stop=("</tool_call>",)))
    assert [call[1] for call in got["calls"]] == ["f"]
    assert (got["reason"], got["stop_reason"]) == ("tool_calls", "</tool_call>")


def test_no_event_without_news(player: Player, tokenizer: TextTokenizer) -> None:
    chunks = player.play(tokenizer.encode(f"<tool_call>{CALL}"))
    *held, call, end = chunks
    assert {chunk.data for chunk in held} == {b""}
    assert len(events_of([call])) == 2
    assert [event["delta"] for event in events_of([end])] == [{}]


def test_logprobs_of_a_call_come_with_its_first_event(
    player: Player, tokenizer: TextTokenizer
) -> None:
    tokens = tokenizer.encode(f"ab<tool_call>{CALL}</tool_call>")
    events = events_of(player.play(tokens, logprobs=0))
    counts = [len((event["logprobs"] or {"content": []})["content"]) for event in events]
    assert counts == [1, 1, len(tokens) - 3, 0, 1]


def test_an_empty_output(player: Player) -> None:
    (event,) = events_of(player.play([]))
    assert event["delta"] == {"role": "assistant", "content": ""}
    assert event["finish_reason"] == "length"


def check_resumed(
    player: Player,
    tokens: Sequence[int],
    cut: int,
    parsers: ParserSpec = BOTH,
    groups: Sequence[int] = (),
    **params: Any,
) -> None:
    """The first `cut` chunks arrive; the client goes on from the last that had events."""
    whole = player.play(tokens, parsers, groups, **params)
    kept = whole[:cut]
    while kept and not kept[-1].data:
        kept.pop()
    if kept and kept[-1].finish is not None:
        return
    num_tokens = sum(len(chunk.token_ids) // 4 for chunk in kept)
    rest = player.play(tokens, parsers, groups[cut:], num_tokens, **params)
    assert said([*kept, *rest]) == said(whole)


@pytest.mark.parametrize("stop", [(), ("so<", '"f"}')])
def test_every_takeover(player: Player, tokenizer: TextTokenizer, stop: tuple[str, ...]) -> None:
    tokens = tokenizer.encode(TEXT)
    for cut in range(len(tokens) + 1):
        check_resumed(player, tokens, cut, stop=stop)


PARTS = st.sampled_from(
    [
        *MARKS,
        CALL,
        CALL[:9],
        CALL[9:],
        XML,
        XML[:9],
        XML[9:],
        DEEPSEEK,
        FENCED,
        " ",
        "\n",
        "x",
        "[",
        "]",
        "{",
        "é",
    ]
)


@settings(max_examples=80, deadline=None)
@given(
    parts=st.lists(PARTS, max_size=6),
    groups=st.lists(st.integers(1, 9), max_size=40),
    cut=st.integers(0, 60),
    tools=st.sampled_from(["", *TOOL_PARSERS]),
    reasoning=st.sampled_from(["", *REASONING_PARSERS]),
    thinking=st.booleans(),
    stop=st.sampled_from([(), ("x", "}}"), ("<tool_call>",)]),
)
def test_any_stream(
    spec: ModelSpec,
    tokenizer: TextTokenizer,
    parts: list[str],
    groups: list[int],
    cut: int,
    tools: str,
    reasoning: str,
    thinking: bool,
    stop: tuple[str, ...],
) -> None:
    parsers = ParserSpec(tools, reasoning, thinking=thinking and bool(reasoning))
    tokens = tokenizer.encode("".join(parts))
    player = Player(spec, tokenizer)
    raw = player.play(tokens, parsers, groups, form="raw", stop=stop)
    text = "".join(chunk.text for chunk in raw)
    finish = raw[-1].finish
    assert finish is not None
    streamed = said(player.play(tokens, parsers, groups, stop=stop))
    assert streamed == expected(text, parsers, finish.reason, finish.stop_reason)
    check_resumed(player, tokens, cut, parsers, groups, stop=stop)

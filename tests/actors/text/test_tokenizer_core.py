"""Prompts become token ids, or a refusal that says what is wrong."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import msgspec
import pytest

from ringcast.actors.core import PeerAdded, PeerLost, Send
from ringcast.actors.text.text_tokenizer import TextTokenizer
from ringcast.actors.text.tokenizer_core import TokenizerCore
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import ConfigError
from ringcast.mq.messages import (
    Abort,
    AbortClient,
    AbortRequest,
    Accepted,
    AddRequest,
    ChatPrompt,
    Detokenize,
    Detokenized,
    ErrorInfo,
    Generate,
    OutputSpec,
    ParserSpec,
    Ping,
    Prompt,
    Rejected,
    ResetPrefixCache,
    Resume,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokensPrompt,
)
from ringcast.mq.sampling_params import SamplingParams

TEMPLATE = "{% for message in messages %}<s>{{ message.content }}{% endfor %}"


def generate(prompt: Prompt, **params: Any) -> Generate:
    sampling = SamplingParams(**params)
    output = OutputSpec(client=7)
    return Generate("r", 3, prompt, sampling, output, 1.5, cache_salt="salt", priority=-4)


def chat(messages: Any = ({"role": "user", "content": "hi"},), **fields: Any) -> ChatPrompt:
    return ChatPrompt(json.dumps(messages).encode(), **fields)


def ask(core: TokenizerCore, question: Tokenize | Detokenize) -> Any:
    (send,) = core.handle("client.7", question, 0.0)
    assert send.to == "client.7"
    assert send.message.request_id == question.request_id
    return send.message


class Driver:
    def __init__(self, spec: ModelSpec, tokenizer: TextTokenizer) -> None:
        self.core = TokenizerCore(spec, tokenizer, clock=lambda: datetime(2024, 1, 2))
        self.tokenizer = tokenizer

    def add(self, prompt: Prompt, **params: Any) -> AddRequest:
        first, send = self.core.handle("client.7", generate(prompt, **params), 0.0)
        assert isinstance(send.message, AddRequest), send.message
        assert send.to == "scheduler.0"
        accepted = Accepted("r", 3, send.message.prompt_token_ids)
        assert first == Send("client.7", accepted)
        return send.message

    def ids(self, prompt: Prompt) -> list[int]:
        return codec.ints(self.add(prompt).prompt_token_ids).tolist()

    def refuse(self, prompt: Prompt, **params: Any) -> ErrorInfo:
        (send,) = self.core.handle("client.7", generate(prompt, **params), 0.0)
        assert isinstance(send.message, Rejected), send.message
        assert (send.to, send.message.request_id, send.message.incarnation) == ("client.7", "r", 3)
        return send.message.error


@pytest.fixture
def driver(spec: ModelSpec, byte_level: TextTokenizer) -> Driver:
    return Driver(spec, byte_level)


def with_template(driver: Driver, spec: ModelSpec, template: str) -> Driver:
    return Driver(msgspec.structs.replace(spec, chat_template=template), driver.tokenizer)


def test_a_text(driver: Driver) -> None:
    request = driver.add(TextPrompt("The dog"), max_tokens=5)
    assert request == AddRequest(
        request_id="r",
        incarnation=3,
        prompt_token_ids=codec.pack(driver.tokenizer.encode("The dog")),
        params=SamplingParams(max_tokens=5),
        output=OutputSpec(client=7),
        arrival=1.5,
        cache_salt="salt",
        priority=-4,
    )
    assert list(driver.core.flush(0.0)) == []
    expected = {
        "requests": 1,
        "rejected": 0,
        "prompt_tokens": len(driver.tokenizer.encode("The dog")),
    }
    assert driver.core.statistics() == expected


def test_special_tokens_of_a_text(spec: ModelSpec, llama_like: TextTokenizer) -> None:
    wide = msgspec.structs.replace(spec, vocab_size=llama_like.vocab_size)
    driver = Driver(wide, llama_like)
    bos = llama_like.backend.token_to_id("<s>")
    assert driver.ids(TextPrompt("the"))[0] == bos
    assert bos not in driver.ids(TextPrompt("the", add_special_tokens=False))
    # A template writes them itself: none is added to what it wrote.
    driver = with_template(driver, wide, TEMPLATE)
    assert driver.ids(chat()).count(bos) == 1


def test_tokens_go_as_they_are(driver: Driver) -> None:
    assert driver.ids(TokensPrompt(codec.pack([1, 2, 503]))) == [1, 2, 503]


def test_max_tokens_keeps_to_the_context(driver: Driver) -> None:
    prompt = TokensPrompt(codec.pack([1] * 60))
    for max_tokens, expected in ((None, 4), (3, 3), (4, 4), (1000, 4)):
        assert driver.add(prompt, max_tokens=max_tokens).params.max_tokens == expected
    assert driver.add(TokensPrompt(codec.pack([1] * 63)), max_tokens=None).params.max_tokens == 1
    error = driver.refuse(prompt, max_tokens=None, min_tokens=5)
    assert error.param == "min_tokens"
    assert "leaves room for 4 after a prompt of 60" in error.message


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TokensPrompt(codec.pack([1] * 64)), "prompt"),
        (TextPrompt("x" * 64), "prompt"),
        (chat([{"role": "user", "content": "x" * 63}]), "messages"),
    ],
)
def test_a_prompt_longer_than_the_context(
    driver: Driver, spec: ModelSpec, prompt: Prompt, param: str
) -> None:
    driver = with_template(driver, spec, TEMPLATE)
    error = driver.refuse(prompt)
    assert error == ErrorInfo(
        "the prompt has 64 tokens, but the model's context is 64 tokens, "
        "one of which at least is for the output",
        status=400,
        type="invalid_request_error",
        param=param,
        code="context_length_exceeded",
    )


def test_a_huge_text_is_measured_by_its_beginning(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = driver.tokenizer.encode

    def count(text: str, *options: Any, **more: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, *options, **more)

    monkeypatch.setattr(driver.tokenizer, "encode", count)
    error = driver.refuse(TextPrompt("x" * 1_000_000))
    assert error.code == "context_length_exceeded"
    assert "has more than 960 tokens" in error.message
    assert lengths == [1024]


def test_long_but_fitting_text_is_not_refused(spec: ModelSpec, word_piece: TextTokenizer) -> None:
    driver = Driver(spec, word_piece)
    assert len(driver.ids(TextPrompt("the" + " " * 5000 + "fox"))) == 2


@pytest.mark.parametrize(
    "prompt", [TextPrompt(""), TokensPrompt(b""), chat(chat_template="{# nothing #}")]
)
def test_empty_prompts(driver: Driver, prompt: Prompt) -> None:
    error = driver.refuse(prompt)
    assert (error.status, "the prompt is empty" in error.message) == (400, True)


def test_a_text_of_no_tokens(spec: ModelSpec, word_piece: TextTokenizer) -> None:
    assert "the prompt is empty" in Driver(spec, word_piece).refuse(TextPrompt("  ")).message


@pytest.mark.parametrize("wrong", [-1, 504, 2**31 - 1])
def test_token_ids_out_of_range(driver: Driver, wrong: int) -> None:
    error = driver.refuse(TokensPrompt(codec.pack([5, 503, wrong, wrong])))
    assert error.param == "prompt"
    assert f"token id {wrong} at place 2" in error.message
    assert "vocabulary has 504 tokens" in error.message


def test_a_tokenizer_larger_than_the_model(driver: Driver, spec: ModelSpec) -> None:
    small = msgspec.structs.replace(spec, vocab_size=501)
    error = Driver(small, driver.tokenizer).refuse(TextPrompt("a</s>"))
    assert "token id 501 at place 1" in error.message


def test_which_template_is_taken(spec: ModelSpec, byte_level: TextTokenizer) -> None:
    own = TextTokenizer(
        byte_level.backend, chat_templates={"default": "own", "tool_use": "own, with tools"}
    )
    text = own.backend.decode
    driver = Driver(spec, own)
    assert text(driver.ids(chat())) == "own"
    assert text(driver.ids(chat(template_kwargs=b'{"tools": [{}]}'))) == "own, with tools"
    driver = with_template(driver, spec, "the spec's")
    assert text(driver.ids(chat())) == "the spec's"
    assert text(driver.ids(chat(chat_template="the request's"))) == "the request's"


def test_tools_of_a_request(spec: ModelSpec, byte_level: TextTokenizer) -> None:
    templates = {"default": "own", "tool_use": "{{ tools[0].function.name }}, {{ tools | tojson }}"}
    own = TextTokenizer(byte_level.backend, chat_templates=templates)
    tools = b'[{"type": "function", "function": {"name": "f"}}]'
    wide = msgspec.structs.replace(spec, max_model_len=256)
    ids = Driver(wide, own).ids(chat(tools=tools))
    assert own.backend.decode(ids) == f"f, {tools.decode()}"


@pytest.mark.parametrize(
    ("template", "reasoning", "thinking"),
    [
        ("{{ messages[0].content }}<think>\n", "qwen3", True),
        ("{{ messages[0].content }}<think>", "deepseek_r1", True),
        ("<think>\n\n</think>\n\n", "qwen3", False),
        ("<think>{{ messages[0].content }}", "qwen3", False),
        ("hi<think>", "", False),
    ],
)
def test_whether_the_prompt_opens_the_reasoning(
    driver: Driver, spec: ModelSpec, template: str, reasoning: str, thinking: bool
) -> None:
    driver = with_template(driver, spec, template)
    parsers = ParserSpec("hermes", reasoning)
    output = OutputSpec(client=7, parsers=parsers)
    first = msgspec.structs.replace(generate(chat()), output=output)
    *_, send = driver.core.handle("client.7", first, 0.0)
    assert send.message.output.parsers == msgspec.structs.replace(parsers, thinking=thinking)
    # A takeover brings the tokens alone.
    prompt = TokensPrompt(send.message.prompt_token_ids)
    again = msgspec.structs.replace(first, prompt=prompt)
    *_, resent = driver.core.handle("client.7", again, 0.0)
    assert resent.message.output == send.message.output


def test_what_a_template_sees(driver: Driver, spec: ModelSpec) -> None:
    def said(template: str, **fields: Any) -> str:
        text: str = driver.tokenizer.decode(
            driver.ids(chat(chat_template=template, **fields)), skip_special_tokens=False
        )
        return text

    assert said("{{ bos_token }}{{ eos_token }}{{ pad_token }}") == "<s></s>"
    assert said("{{ tools is none }} {{ documents is none }}") == "True True"
    assert said("{{ add_generation_prompt }}") == "True"
    assert said("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    assert said("{{ thinking }}", template_kwargs=b'{"thinking": "deep"}') == "deep"
    assert said("{{ strftime_now('%Y-%m-%d') }}") == "2024-01-02"
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    assert said("{{ messages[0].content }} and more", **continued) == "hi"


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        (chat(), "messages", "no chat template: give one with --chat-template, or use /v1/com"),
        (chat([], chat_template="T"), "messages", "at least one message"),
        (chat("hi", chat_template="T"), "messages", "must be a list"),
        (chat(chat_template="{{ raise_exception('no!') }}"), "messages", "failed: no!"),
        (chat(chat_template="{% if %}"), "chat_template", "has an error in line 1"),
        (chat(chat_template="T", template_kwargs=b"[]"), "chat_template_kwargs", "JSON object"),
        (
            chat(chat_template="T", template_kwargs=b'{"messages": []}'),
            "chat_template_kwargs",
            "can't set 'messages'",
        ),
        (
            chat(chat_template="T", continue_final_message=True),
            "continue_final_message",
            "can't be combined with add_generation_prompt",
        ),
    ],
)
def test_chats_that_are_refused(driver: Driver, prompt: Prompt, param: str, words: str) -> None:
    error = driver.refuse(prompt)
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert words in error.message


def test_a_broken_template_option_is_found_at_the_start(
    spec: ModelSpec, byte_level: TextTokenizer
) -> None:
    broken = msgspec.structs.replace(spec, chat_template="{% for %}")
    with pytest.raises(ConfigError, match=r"chat_template: .* error in line 1"):
        TokenizerCore(broken, byte_level)


class RustPanic(BaseException):
    """Like pyo3's PanicException, which is no Exception."""


@pytest.mark.parametrize("error", [ValueError("odd"), RustPanic("odd")])
def test_a_failure_of_ours_costs_one_request(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: Any, **__: Any) -> list[int]:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(driver.tokenizer, "encode", fail)
        info = driver.refuse(TextPrompt("hi"))
    assert (info.status, info.type) == (500, "server_error")
    assert f"{type(error).__name__}: odd" in info.message
    assert driver.ids(TextPrompt("hi")) == driver.tokenizer.encode("hi")
    assert driver.core.statistics()["rejected"] == 1


def test_an_abort_follows_its_request(driver: Driver) -> None:
    (send,) = driver.core.handle("client.7", Abort("r", 3), 0.0)
    assert send == ("scheduler.0", AbortRequest("r", 3))


def test_a_takeover_goes_on_with_its_output(driver: Driver) -> None:
    resume = [Resume(1, codec.pack([7, 8])), Resume(2, b"")]
    request = generate(TokensPrompt(codec.pack([1, 2])), n=3, max_tokens=None)
    request = msgspec.structs.replace(request, resume=resume)
    accepted, add = driver.core.handle("client.7", request, 0.0)
    assert accepted == ("client.7", Accepted("r", 3, codec.pack([1, 2])))
    assert add.message.resume == resume
    assert add.message.params.max_tokens == 62  # output included, as the first time


def test_a_new_replica_hears_of_lost_clients_too(driver: Driver) -> None:
    for name in ("scheduler.1", "coordinator.0"):
        assert list(driver.core.handle(name, PeerAdded(), 0.0)) == []
    sends = driver.core.handle("client.12", PeerLost(), 0.0)
    assert [send.to for send in sends] == ["scheduler.0", "scheduler.1"]


def test_a_lost_client_is_told_of_behind_its_requests(driver: Driver) -> None:
    (send,) = driver.core.handle("client.12", PeerLost(), 0.0)
    assert send == ("scheduler.0", AbortClient(12))
    for name in ("scheduler.0", "detokenizer.0"):
        assert list(driver.core.handle(name, PeerLost(), 0.0)) == []


def test_a_ping_goes_on(driver: Driver) -> None:
    (send,) = driver.core.handle("client.7", Ping(7, 2), 0.0)
    assert send == ("scheduler.0", Ping(7, 2))


def test_a_reset_of_the_prefix_cache_goes_on(driver: Driver) -> None:
    (send,) = driver.core.handle("client.7", ResetPrefixCache(7, "x"), 0.0)
    assert send == ("scheduler.0", ResetPrefixCache(7, "x"))


def test_questions_are_answered_here(driver: Driver, spec: ModelSpec) -> None:
    text = "The dog is wörld"
    ids = driver.tokenizer.encode(text)
    plain = ask(driver.core, Tokenize(7, "q", TextPrompt(text)))
    assert plain == Tokenized("q", codec.pack(ids))
    named = ask(driver.core, Tokenize(7, "q", TextPrompt(text), with_texts=True))
    assert named.texts == driver.tokenizer.backend.encode(text, add_special_tokens=False).tokens
    assert ask(driver.core, Detokenize(7, "q", codec.pack(ids))) == Detokenized("q", text)
    driver = with_template(driver, spec, TEMPLATE)
    rendered = ask(driver.core, Tokenize(7, "q", chat()))
    assert rendered.token_ids == codec.pack(driver.tokenizer.encode("<s>hi"))
    special = ask(driver.core, Detokenize(7, "q", rendered.token_ids))
    assert special.text == "<s>hi"
    assert driver.core.statistics()["requests"] == 0


@pytest.mark.parametrize(
    ("question", "param"),
    [
        (Tokenize(7, "q", TextPrompt("")), "prompt"),
        (Tokenize(7, "q", chat(messages=5)), "messages"),
        (Tokenize(7, "q", TextPrompt("x" * 1_000_000)), "prompt"),
        (Detokenize(7, "q", codec.pack([100_000])), "tokens"),
    ],
)
def test_questions_that_are_refused(
    driver: Driver, question: Tokenize | Detokenize, param: str
) -> None:
    answer = ask(driver.core, question)
    assert isinstance(answer, Rejected)
    assert (answer.error.status, answer.error.param) == (400, param)


@pytest.mark.parametrize("error", [ValueError("odd"), RustPanic("odd")])
def test_a_question_that_fails_is_answered(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: Any, **__: Any) -> list[int]:
        raise error

    monkeypatch.setattr(driver.tokenizer, "encode", fail)
    answer = ask(driver.core, Tokenize(7, "q", TextPrompt("hi")))
    assert answer.error.status == 500


def keep(driver: Driver, prompt: Prompt, num_tokens: int) -> list[int]:
    request = msgspec.structs.replace(generate(prompt), keep_prompt_tokens=num_tokens)
    _, send = driver.core.handle("client.7", request, 0.0)
    return codec.ints(send.message.prompt_token_ids).tolist()


@pytest.mark.parametrize("num_words", [10, 30, 3000])
def test_the_last_tokens_of_a_prompt(driver: Driver, num_words: int) -> None:
    """Of a long text only the end is read."""
    text = " ".join(f"the dog {i}" for i in range(num_words))
    ids = driver.tokenizer.encode(text)
    for count in (1, 7, 40):
        assert keep(driver, TextPrompt(text), count) == ids[-count:]
    assert keep(driver, TokensPrompt(codec.pack(ids)), 7) == ids[-7:]
    assert keep(driver, TextPrompt("the"), 40) == driver.tokenizer.encode("the")


def test_little_of_a_huge_prompt_is_read(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    encode = driver.tokenizer.encode

    def count(text: str, *options: Any, **more: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, *options, **more)

    monkeypatch.setattr(driver.tokenizer, "encode", count)
    assert len(keep(driver, TextPrompt("x" * 1_000_000), 5)) == 5
    assert lengths == [(5 + 64) * 16]


def test_special_tokens_are_kept_before_the_last_ones(
    spec: ModelSpec, llama_like: TextTokenizer
) -> None:
    driver = Driver(msgspec.structs.replace(spec, vocab_size=llama_like.vocab_size), llama_like)
    bos, *ids = llama_like.encode("the dog the dog")
    assert keep(driver, TextPrompt("the dog the dog"), 3) == [bos, *ids[-2:]]
    assert keep(driver, TextPrompt("the dog the dog"), 1) == [bos]
    assert keep(driver, TextPrompt("the dog the dog", False), 3) == ids[-3:]
    assert keep(driver, TextPrompt("the"), 50) == llama_like.encode("the")

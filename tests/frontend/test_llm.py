"""LLM over a fake engine: order, progress, mistakes, Ctrl-C, ends."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ringcast.frontend.llm import LLM
from ringcast.frontend.outputs import Logprob
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
)
from ringcast.mq.messages import ChatPrompt, ErrorInfo, TextPrompt, TokensPrompt
from ringcast.mq.sampling_params import SamplingParams

TEXT = "Hello, wörld 🌍!"
MESSAGES = [{"role": "user", "content": "hi"}]


def test_results_come_in_the_order_of_prompts(connection: Any, engine: Any) -> None:
    prompts = ["a", {"prompt": "b"}, {"prompt_token_ids": [1, 2]}, [3, 4]]
    params = [SamplingParams(max_tokens=i + 1) for i in range(4)]
    with LLM("some-model") as llm:
        results = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 2, 3, 4]
    assert [result.prompt for result in results] == ["a", "b", None, None]
    assert [result.prompt_token_ids for result in results] == [[7, 8, 9], [7, 8, 9], [1, 2], [3, 4]]
    assert [sent.prompt for sent in engine.generated] == [
        TextPrompt("a"),
        TextPrompt("b"),
        TokensPrompt(codec.pack([1, 2])),
        TokensPrompt(codec.pack([3, 4])),
    ]
    result = results[3]
    assert result.finished
    assert (result.num_prompt_tokens, result.num_cached_tokens) == (7, 0)
    assert result.outputs[0].text == "Hello, wörld 🌍"
    assert (result.outputs[0].finish_reason, result.outputs[0].finished) == ("length", True)


@pytest.mark.parametrize("prompt", ["a", {"prompt": "a"}, [1, 2]])
def test_one_prompt_gives_a_list_of_one(connection: Any, prompt: Any) -> None:
    with LLM() as llm:
        (result,) = llm.generate(prompt, use_tqdm=False)
        assert llm.generate([], use_tqdm=False) == []
    assert result.outputs[0].text == TEXT


def test_choices_and_logprobs(connection: Any) -> None:
    with LLM() as llm:
        params = SamplingParams(n=2, logprobs=1, max_tokens=2)
        (result,) = llm.generate("a", params, use_tqdm=False)
    assert [output.index for output in result.outputs] == [0, 1]
    output = result.outputs[1]
    assert output.cumulative_logprob == -1.0
    assert output.logprobs is not None
    assert output.logprobs[0] == {100: Logprob(-0.5, 2, "Hello"), 0: Logprob(-1.0, 1, "t0")}
    assert len(output.logprobs) == 2


def test_chat(connection: Any, engine: Any) -> None:
    with LLM() as llm:
        one = llm.chat(MESSAGES, use_tqdm=False)
        two = llm.chat(
            [MESSAGES, MESSAGES],
            use_tqdm=False,
            add_generation_prompt=False,
            continue_final_message=True,
            chat_template_kwargs={"think": False},
        )
    assert [len(one), len(two)] == [1, 2]
    assert one[0].outputs[0].text == TEXT
    prompt = engine.generated[2].prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)
    assert prompt.template_kwargs == b'{"think":false}'


def test_defaults_are_the_models(connection: Any, engine: Any, spec: ModelSpec) -> None:
    spec.sampling_defaults.update(temperature=0.25)
    with LLM() as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25)
        llm.generate("a", use_tqdm=False)
    assert engine.generated[0].params.temperature == 0.25


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (5, "prompt must be a string"),
        ({"text": "a"}, "prompt must be a string"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt must be a string"),
        ({"prompt_token_ids": "ab"}, "prompt must be a string"),
        ({"prompt": [1]}, "prompt must be a string"),
        ({"prompt_token_ids": []}, "prompt_token_ids must have at least one token"),
        (
            {"prompt_token_ids": [1, 1000]},
            r"prompt_token_ids\[1\] must be a token id from 0 to 999",
        ),
        ([[1, True]], r"prompt\[1\] must be a token id"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_sent(
    connection: Any, engine: Any, prompt: Any, words: str
) -> None:
    with LLM() as llm, pytest.raises(InvalidRequestError, match=words):
        llm.generate(["fine", prompt] if not isinstance(prompt, list) else prompt, use_tqdm=False)
    assert engine.sent == []


@pytest.mark.parametrize("messages", ["hi", [], ["hi"], [MESSAGES, "hi"], [{"content": "\ud800"}]])
def test_bad_conversations(connection: Any, engine: Any, messages: Any) -> None:
    engine.reject = ErrorInfo("messages are empty", param="messages")  # what the tokenizer says
    with LLM() as llm, pytest.raises(InvalidRequestError, match="messages"):
        llm.chat(messages, use_tqdm=False)


def test_params_must_fit_the_prompts(connection: Any) -> None:
    with LLM() as llm:
        with pytest.raises(InvalidRequestError, match="one for each of the 2 prompts, got 1"):
            llm.generate(["a", "b"], [SamplingParams()])
        with pytest.raises(InvalidRequestError, match="must be SamplingParams, got dict"):
            llm.generate(["a"], [{}])  # type: ignore[list-item]


def test_one_refused_prompt_aborts_the_others(connection: Any, engine: Any) -> None:
    engine.hold = 1

    def send_or_reject(to: str, message: Any) -> None:
        engine.reject = ErrorInfo("too long") if "'bad'" in repr(message) else None
        engine.send(to, message)

    connection.send = send_or_reject
    with LLM() as llm:
        with pytest.raises(InvalidRequestError, match="too long"):
            llm.generate(["a", "b", "bad"], use_tqdm=False)
        a, b, _ = engine.generated
        engine.hold = None
        assert engine.aborted == [a.request_id, b.request_id]
        assert llm.generate("fine", use_tqdm=False)[0].outputs[0].text == TEXT


def test_a_failed_request_raises(connection: Any, engine: Any) -> None:
    engine.fail = ErrorInfo("the worker stumbled", 500)
    with LLM() as llm, pytest.raises(RequestFailedError, match="stumbled"):
        llm.generate("a", use_tqdm=False)


def test_more_prompts_than_fit_at_once(connection: Any, engine: Any) -> None:
    most = 0

    def counting(to: str, message: Any) -> None:
        nonlocal most
        engine.send(to, message)
        most = max(most, engine.num_running)

    connection.send = counting
    with LLM(max_num_queued_reqs=3) as llm:
        results = llm.generate([f"{i}" for i in range(20)], use_tqdm=False)
    assert [result.prompt for result in results] == [f"{i}" for i in range(20)]
    assert most == 3


def test_ctrl_c_aborts_what_runs(connection: Any, engine: Any) -> None:
    engine.hold = 0

    def interrupting(to: str, message: Any) -> None:
        engine.send(to, message)
        if len(engine.generated) == 3 and not engine.aborted:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    connection.send = interrupting
    with LLM() as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], use_tqdm=False)
        assert len(engine.aborted) == 3
        engine.hold = None
        assert llm.generate("d", use_tqdm=False)[0].outputs[0].text == TEXT


def test_streams_can_be_left_early(connection: Any, engine: Any) -> None:
    engine.hold = 2
    with LLM() as llm:
        stream = llm.stream("a")
        assert next(stream).outputs[0].text == "Hello"
        stream.close()
        assert len(engine.aborted) == 1
        engine.hold = None
        *_, last = llm.stream_chat(MESSAGES)
        assert last.outputs[0].text == TEXT


def test_the_engines_death_raises(connection: Any, engine: Any) -> None:
    engine.words = [None]  # no word, so this breaks it
    with LLM() as llm:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="the fake engine is broken\nAttributeError"):
                llm.generate("a", SamplingParams(logprobs=0), use_tqdm=False)
    assert len(engine.generated) == 1


def test_options(connection: Any) -> None:
    with LLM("m", max_model_len=100, dtype="float32", enable_prefix_caching=False):
        (config,) = connection.launched
    assert (config.model, config.max_model_len, config.dtype) == ("m", 100, "float32")
    with pytest.raises(ConfigError, match="unknown option 'max_len'"):
        LLM("m", max_len=5)
    with pytest.raises(ConfigError, match="block_size = 0"):
        LLM("m", block_size=0)
    with pytest.raises(ConfigError, match=r"shutdown_timeout = 5\.0: it is for servers"):
        LLM("m", shutdown_timeout=5)
    assert len(connection.launched) == 1


def test_a_failed_start_leaves_nothing(connection: Any) -> None:
    connection.refusal = ConfigError("dtype = 'float16': this processor has none")
    with pytest.raises(ConfigError, match="float16"):
        LLM("m")


def test_shutdown_is_idempotent_and_final(connection: Any) -> None:
    llm = LLM()
    llm.shutdown()
    llm.shutdown()
    assert connection.num_closed == 1
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("a")


def test_a_forgotten_llm_ends(connection: Any) -> None:
    llm = LLM()
    del llm
    gc.collect()
    assert connection.num_closed == 1


def test_the_progress_bar_counts_prompts(
    connection: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM() as llm:
        llm.generate(["a", "b"])
        assert "2/2" in capfd.readouterr().err
        llm.generate(["a", "b"], use_tqdm=False)
        assert capfd.readouterr() == ("", "")


def test_an_llm_that_nobody_shuts_down_ends_with_its_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import ringcast.frontend.async_llm as module
from ringcast import LLM
from ringcast.mq.config import ModelSpec

class Connection:
    details = {}
    send = None

    @classmethod
    async def launch(cls, *_):
        return cls()

    def attach(self, *_):
        pass

    async def close(self, timeout):
        print("closed")

spec = ModelSpec(
    name="m", path="", tokenizer_path="", architecture="", vocab_size=9,
    max_model_len=9, eos_token_ids=[], hf_config={},
)
module.EngineConnection = Connection
module.resolve_model = lambda *_: spec
llm = LLM()
print("end of script")
"""
    )
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end of script\nclosed\n", "")

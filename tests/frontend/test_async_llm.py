"""AsyncLLM over a fake engine."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from ringcast.frontend.async_llm import AsyncLLM
from ringcast.frontend.outputs import Logprob
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import ConfigError, EngineDeadError, InvalidRequestError
from ringcast.mq.sampling_params import RequestOutputKind, SamplingParams
from ringcast.mq.supervision import PeersLost

TEXT = "Hello, wörld 🌍!"


async def test_outputs_are_cumulative_snapshots(connection: Any, engine: Any) -> None:
    async with AsyncLLM("m") as llm:
        outputs = [output async for output in llm.generate("a", request_id="mine")]
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-1] == TEXT
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [len(output.outputs[0].token_ids) for output in outputs[:3]] == [1, 2, 3]
    assert {output.request_id for output in outputs} == {"mine"}
    assert engine.generated[0].output.delta


async def test_requests_run_together(connection: Any) -> None:
    async with AsyncLLM() as llm:

        async def last(i: int) -> str:
            *_, output = [o async for o in llm.chat([{"role": "user", "content": str(i)}])]
            return output.outputs[0].text

        assert set(await asyncio.gather(*(last(i) for i in range(20)))) == {TEXT}


async def test_abort_by_id(connection: Any, engine: Any) -> None:
    engine.hold = 1
    async with AsyncLLM() as llm:
        outputs = llm.generate("a", SamplingParams(), "mine")
        first = await anext(outputs)
        with pytest.raises(InvalidRequestError, match="'mine' is in use"):
            await anext(llm.generate("b", request_id="mine"))
        await llm.abort(["mine", "never was"])
        last = await anext(outputs)
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)
        await llm.abort("mine")
    assert (first.finished, last.outputs[0].finish_reason) == (False, "abort")
    assert len(engine.aborted) == 1


async def test_a_death_in_between_is_a_pause(connection: Any, engine: Any) -> None:
    engine.hold = 2
    async with AsyncLLM() as llm:
        outputs = llm.generate("a", SamplingParams(logprobs=1))
        first = await anext(outputs)
        while len(first.outputs[0].token_ids) < 2:
            first = await anext(outputs)
        await engine.crash()
        names = ["worker.0", "scheduler.0"]
        connection.on_lost(PeersLost(1, "worker.0", "it was killed", "", names))
        connection.on_back(names)
        engine.hold = None
        rest = [output async for output in outputs]
    last = rest[-1].outputs[0]
    assert (last.text, last.token_ids) == (TEXT, [100, 101, 102, 103, 104])
    assert [list(logprobs) for logprobs in last.logprobs or []] == [[i, 0] for i in last.token_ids]
    assert [len(sent.resume) for sent in engine.generated] == [0, 1]


async def test_leaving_the_loop_aborts(connection: Any, engine: Any) -> None:
    engine.hold = 1
    async with AsyncLLM() as llm:
        outputs = llm.generate("a")
        await anext(outputs)
        await outputs.aclose()
        assert len(engine.aborted) == 1
        await llm.client.wait_idle()


async def test_starts_on_first_use_once(connection: Any, engine: Any) -> None:
    progress: list[Any] = []
    llm = AsyncLLM("m", on_progress=lambda *said: progress.append(said))
    assert connection.launched == []
    await asyncio.gather(*(anext(llm.generate("a")) for _ in range(3)))
    assert len(connection.launched) == 1
    assert progress == [("model", "converting", 1, 2), ("worker.0", "loading", 1, 2)]
    assert llm.details == {"dtype": "fake"}
    await llm.shutdown()


async def test_shutdown_fails_what_runs_and_what_comes(connection: Any, engine: Any) -> None:
    engine.hold = 1
    llm = AsyncLLM()
    outputs = llm.generate("a")
    await anext(outputs)
    await llm.shutdown()
    await llm.shutdown()
    assert connection.num_closed == 1
    with pytest.raises(EngineDeadError, match="shut down"):
        await anext(outputs)
    with pytest.raises(EngineDeadError, match="shut down"):
        await anext(llm.generate("a"))


async def test_a_failed_start(connection: Any) -> None:
    connection.refusal = ConfigError("no")
    with pytest.raises(ConfigError, match="no"):
        async with AsyncLLM():
            pass
    with pytest.raises(ConfigError, match="unknown option"):
        AsyncLLM(nonsense=1)


async def test_default_params(connection: Any, spec: ModelSpec) -> None:
    spec.sampling_defaults.update(top_k=7)
    async with AsyncLLM() as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_k=7)


async def test_output_kinds(connection: Any, engine: Any) -> None:
    def asked(kind: RequestOutputKind, n: int = 1) -> SamplingParams:
        return SamplingParams(output_kind=kind, n=n, logprobs=1)

    async with AsyncLLM() as llm:
        cumulative = [o async for o in llm.generate("a", asked(RequestOutputKind.CUMULATIVE))]
        deltas = [o async for o in llm.generate("a", asked(RequestOutputKind.DELTA))]
        finals = [o async for o in llm.generate("a", asked(RequestOutputKind.FINAL_ONLY, n=3))]
    assert [o.outputs[0].text for o in cumulative][-1] == TEXT
    assert "".join(o.outputs[0].text for o in deltas) == TEXT
    assert all(len(o.outputs[0].token_ids) == len(o.outputs[0].logprobs or ()) for o in deltas)
    assert [t for o in deltas for t in o.outputs[0].token_ids] == [100, 101, 102, 103, 104]
    assert [o.finished for o in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].outputs[0].finish_reason == "stop"
    assert deltas[-1].outputs[0].cumulative_logprob == cumulative[-1].outputs[0].cumulative_logprob
    (final,) = finals
    assert [choice.text for choice in final.outputs] == [TEXT] * 3
    assert final.finished
    assert [g.output.delta for g in engine.generated] == [True, True, False]


async def test_deltas_have_the_choices_that_have_something_new(connection: Any) -> None:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, n=2)
    texts = {0: "", 1: ""}
    async with AsyncLLM() as llm:
        async for output in llm.generate("a", params):
            assert output.outputs
            for choice in output.outputs:
                assert choice.text or choice.finished
                texts[choice.index] += choice.text
    assert texts == {0: TEXT, 1: TEXT}


async def test_prompt_logprobs(connection: Any) -> None:
    async with AsyncLLM() as llm:
        *_, output = [o async for o in llm.generate("a", SamplingParams(prompt_logprobs=1, n=2))]
        *_, plain = [o async for o in llm.generate("a")]
    assert plain.prompt_logprobs is None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [entry and sorted(entry) for entry in output.prompt_logprobs[1:]] == [[0, 8], [0, 9]]
    assert output.prompt_logprobs[1] == {8: Logprob(-4.5, 5, "p"), 0: Logprob(-1.0, 1, "t0")}

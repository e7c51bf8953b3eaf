"""Arguments for logits processors of one's own, where there are none."""

from __future__ import annotations

from typing import Any

import pytest

from ringcast.frontend.client import EngineClient
from ringcast.frontend.llm import LLM
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import InvalidRequestError
from ringcast.mq.messages import TextPrompt
from ringcast.mq.sampling_params import SamplingParams


@pytest.mark.parametrize("takes", [True, False])
def test_they_are_refused_where_nobody_reads_them(spec: ModelSpec, takes: bool) -> None:
    client = EngineClient(spec, lambda to, message: None, takes_extra_args=takes)
    client.submit(TextPrompt("a"), SamplingParams(extra_args={}))
    if takes:
        client.submit(TextPrompt("a"), SamplingParams(extra_args={"mine": 1}))
        return
    with pytest.raises(InvalidRequestError, match="without --logits-processors") as caught:
        client.submit(TextPrompt("a"), SamplingParams(extra_args={"mine": 1}))
    assert caught.value.param == "extra_args"
    assert client.num_open == 1


def test_an_llm_knows_whether_it_has_processors(connection: Any) -> None:
    params = SamplingParams(extra_args={"mine": 1})
    with LLM() as llm, pytest.raises(InvalidRequestError, match="without --logits-processors"):
        llm.generate("a", params, use_tqdm=False)
    with LLM(logits_processors=["mine:Mine"]) as llm:
        assert llm.generate("a", params, use_tqdm=False)

"""An engine of a folder that holds config.json alone: random weights, token ids in and out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from ringcast import LLM, SamplingParams
from ringcast.mq.errors import InvalidRequestError, ModelLoadError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_tiny_model(tmp_path / "tiny")
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    return folder


def test_token_ids_in_and_out(folder: Path) -> None:
    options = {
        "device": "cpu",
        "load_format": "dummy",
        "num_gpu_blocks_override": 64,
        "num_threads": 1,
    }
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        LLM(str(folder), **options)
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0, logprobs=1)
    with LLM(str(folder), skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": [3, 4, 5]}, {"prompt_token_ids": [9]}], params, use_tqdm=False
        )
        for output in outputs:
            (choice,) = output.outputs
            assert (len(choice.token_ids), choice.text) == (6, "")
            assert choice.finish_reason == "length"
            assert choice.logprobs is not None
            assert len(choice.logprobs) == 6
        with pytest.raises(InvalidRequestError, match="prompt needs a tokenizer"):
            llm.generate("a text", params, use_tqdm=False)

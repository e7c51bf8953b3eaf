"""The users of scripts/bench faults: they notice what is lost, repeated or cut off."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def fault_load(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS / "peers"))
    return importlib.import_module("fault_load")


@pytest.fixture
def load(fault_load, tmp_path):
    importlib.import_module("counting_model").make_counting_model(tmp_path)
    return fault_load.Load(1, 0, tmp_path)


@pytest.fixture
def stream(fault_load):
    return fault_load.Stream(random.Random(0), 0, 1, exact=True)


def event(text, index=0):
    body = {"choices": [{"index": index, "text": text}], "usage": None}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def said(load, stream):
    words = load._expectation.words(stream.prompt, 0, stream.num_tokens)
    return [f" {word}" for word in words]


def counts_after(load, stream, texts, done=True):
    data = b"".join(map(event, texts)) + b"data: [DONE]\n\n" * done
    for start in range(0, len(data), 7):  # as the network cuts it
        stream.feed(data[start : start + 7])
    load._compare(stream)
    return load.counts.lost, load.counts.repeated


def test_a_whole_stream_is_right(load, stream):
    assert counts_after(load, stream, said(load, stream)) == (0, 0)
    assert not load.counts.reasons


def test_a_lost_token_is_counted(load, stream):
    texts = said(load, stream)
    assert counts_after(load, stream, texts[:50] + texts[51:]) == (1, 0)
    assert "token 50" in load.counts.reasons[0]


def test_repeated_tokens_are_counted(load, stream):
    texts = said(load, stream)
    assert counts_after(load, stream, texts[:50] + texts[47:]) == (0, 3)


def test_a_stream_that_broke_off_is_right_as_far_as_it_went(load, stream):
    texts = [*said(load, stream)[:20], " 0"]
    assert counts_after(load, stream, texts, done=False) == (0, 0)


def test_a_stream_that_broke_off_may_not_have_repeated(load, stream):
    texts = said(load, stream)
    assert counts_after(load, stream, texts[:20] + texts[18:22], done=False) != (0, 0)


def test_an_error_ends_a_stream(fault_load, stream):
    with pytest.raises(fault_load.StreamError, match="died"):
        stream.feed(b'data: {"error": {"message": "worker.0 died"}}\n\n')

"""A BERT encoder and its pooling against transformers, by steps of its runner."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_bert import DIMENSION, SHAPE, expected, make_tiny_bert

from ringcast.executor.encoder import SHORTEST, make_groups
from ringcast.executor.models import find_model
from ringcast.executor.runner import make_runner
from ringcast.frontend.hub import resolve_model
from ringcast.mq import codec
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError, ModelLoadError
from ringcast.mq.messages import NewSequence, StepPlan
from ringcast.mq.sampling_params import SamplingParams

CPU = torch.device("cpu")
LENGTHS = [1, 64, 5, 63, 2, 40, 31, 5, 1, 17]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The folder, and transformers' model."""
    folder = tmp_path_factory.mktemp("bert")
    return folder, make_tiny_bert(folder)


def runner_of(folder, **options):
    fixed = {"model": str(folder), "device": "cpu", "num_threads": 1}
    config = build(EngineConfig, {**fixed, **options})
    runner = make_runner(config, resolve_model(config))
    runner.load(lambda *_: None)
    return runner


def prompts_of(lengths):
    rng = np.random.default_rng(8)
    return [rng.integers(0, SHAPE["vocab_size"], length).tolist() for length in lengths]


def run(runner, prompts, rows=None, removed=()):
    """One step: a vector for each prompt."""
    rows = list(range(len(prompts))) if rows is None else rows
    new = [
        NewSequence(row, "r", 0, codec.pack(ids), len(ids), 0, b"", SamplingParams())
        for row, ids in zip(rows, prompts, strict=True)
    ]
    lengths = codec.pack([len(ids) for ids in prompts])
    plan = StepPlan(0, codec.pack(removed), new, b"", b"", b"", b"", codec.pack(rows), lengths)
    output = runner.execute(plan)
    assert codec.ints(output.rows).tolist() == rows
    assert not output.token_ids
    return codec.floats(output.pooled).reshape(len(prompts), DIMENSION)


@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
def test_vectors_are_those_of_transformers(bert, kind):
    folder, model = bert
    prompts = prompts_of(LENGTHS)
    vectors = run(runner_of(folder, pooling_type=kind), prompts)
    wanted = [expected(model, ids, kind) for ids in prompts]
    np.testing.assert_allclose(vectors, wanted, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("act", ["gelu", "gelu_new"])
def test_without_normalisation(tmp_path, act):
    model = make_tiny_bert(tmp_path, ("Transformer", "Pooling"), hidden_act=act)
    prompts = prompts_of([3, 20])
    vectors = run(runner_of(tmp_path), prompts)
    wanted = [expected(model, ids, normalize=False) for ids in prompts]
    np.testing.assert_allclose(vectors, wanted, atol=1e-4)
    assert np.linalg.norm(vectors, axis=1).min() > 1.5


@pytest.mark.parametrize(
    ("mode", "kind"), [("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last")]
)
def test_the_pooling_is_the_models_own(bert, tmp_path, mode, kind):
    model = make_tiny_bert(tmp_path, pooling=mode)
    (ids,) = prompts_of([9])
    np.testing.assert_allclose(
        run(runner_of(tmp_path), [ids])[0], expected(model, ids, kind), atol=1e-5
    )


def test_steps_keep_their_rows_apart(bert):
    folder, model = bert
    runner = runner_of(folder)
    a, b, c = prompts_of([7, 3, 7])
    run(runner, [a, b], rows=[4, 0])
    vectors = run(runner, [c], rows=[4], removed=[4])
    np.testing.assert_allclose(vectors, [expected(model, c)], atol=1e-5)
    assert not runner.execute(StepPlan(9, codec.pack([0]), [], *[b""] * 6)).pooled
    assert runner.details()["dimension"] == DIMENSION


def test_half_precision_is_near(bert):
    folder, model = bert
    prompts = prompts_of(LENGTHS)
    vectors = run(runner_of(folder, dtype="bfloat16"), prompts)
    wanted = np.array([expected(model, ids) for ids in prompts])
    assert ((vectors * wanted).sum(1) > 0.99).all()


def test_dummy_weights(bert):
    folder, _ = bert
    vectors = run(runner_of(folder, load_format="dummy", seed=1), prompts_of([4, 9]))
    assert np.isfinite(vectors).all()
    assert abs(vectors[0] - vectors[1]).max() > 1e-3


def test_groups_cover_every_token_once_with_little_padding():
    lengths = np.array(LENGTHS)
    groups = make_groups(lengths, CPU)
    places = np.concatenate([group.places.numpy() for group in groups])
    assert sorted(places.tolist()) == list(range(lengths.sum()))
    for group in groups:
        assert len(group.places) >= SHORTEST * len(group.index)
        assert (group.index[group.real] == group.places).all()
        assert (group.mask is None) == (len(group.real) == len(group.index))
    longest = [len(group.index) // group.size for group in groups]
    assert all(a > b for a, b in pairwise(longest))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "hidden_size 48 can't be split evenly into 5 heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
        ({"layer_norm_eps": 0}, "layer_norm_eps must be positive"),
    ],
)
def test_configs_that_are_not_run(change, reason):
    with pytest.raises(ModelLoadError, match=reason):
        find_model("BertModel").check({**SHAPE, **change})


def test_weights_of_another_model(bert, tmp_path):
    make_tiny_bert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, reason in (
        ({"num_hidden_layers": 4}, r"encoder\.layer\.3\..* is missing"),
        ({"num_hidden_layers": 2}, r"encoder\.layer\.2\..* is not part of a model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelLoadError, match=reason):
            runner_of(tmp_path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "fake", "num_threads": None}, "device = 'fake': embedding models run on cpu"),
        ({"quantization": "int8"}, "quantization = 'int8': embedding models have 'none' only"),
        ({"kv_cache_dtype": "float32"}, "kv_cache_dtype = 'float32': embedding models have 'auto'"),
        ({"deterministic": True}, "deterministic = True: embedding models have False only"),
    ],
)
def test_options_that_encoders_do_not_have(bert, options, reason):
    with pytest.raises(ConfigError, match=reason):
        runner_of(bert[0], **options)


@pytest.mark.gpu
def test_on_a_device(bert):
    folder, model = bert
    prompts = prompts_of(LENGTHS)
    vectors = run(runner_of(folder, device="cuda", num_threads=None), prompts)
    np.testing.assert_allclose(vectors, [expected(model, ids) for ids in prompts], atol=1e-4)

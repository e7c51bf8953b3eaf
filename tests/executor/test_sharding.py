"""What each rank has of each weight: together the whole, and no more read than that."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from ringcast.executor.models import find_model
from ringcast.executor.sharding import Sharding
from ringcast.executor.weights import DummyWeights, SafetensorsWeights, take_experts
from ringcast.mq.errors import ConfigError, ModelLoadError

HIDDEN, HEAD, INNER, VOCABULARY = 6, 4, 12, 11
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
}


class Whole:
    """Numbers that tell where they are. `read`: of each weight, how many."""

    def __init__(self):
        self.read = {}

    def take(self, name, shape, part=()):
        taken = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)[part]
        self.read[name] = taken.numel()
        return taken

    def finish(self, ignored):
        pass


def declared(**changes):
    return find_model("LlamaForCausalLM").check({**SHAPE, **changes})


def parts(size, name, shape_of, **changes):
    """Of each rank."""
    taken = []
    for rank in range(size):
        sharding = Sharding(declared(**changes), rank, size)
        taken.append(sharding.weights(Whole()).take(name, shape_of(sharding.local)))
    return taken


def whole(*shape):
    return Whole().take("", shape)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs_and_inputs(size):
    q = parts(size, "a.q_proj.weight", lambda c: (c.heads * HEAD, HIDDEN))
    assert torch.equal(torch.cat(q), whole(4 * HEAD, HIDDEN))
    o = parts(size, "a.o_proj.weight", lambda c: (HIDDEN, c.heads * HEAD))
    assert torch.equal(torch.cat(o, 1), whole(HIDDEN, 4 * HEAD))
    up = parts(size, "a.up_proj.weight", lambda c: (c.intermediate_size, HIDDEN))
    assert torch.equal(torch.cat(up), whole(INNER, HIDDEN))
    down = parts(size, "a.down_proj.weight", lambda c: (HIDDEN, c.intermediate_size))
    assert torch.equal(torch.cat(down, 1), whole(HIDDEN, INNER))


def test_key_heads_are_split_or_repeated():
    def shape(c):
        return (c.kv_heads * HEAD, HIDDEN)

    two = parts(2, "a.k_proj.weight", shape)
    assert torch.equal(torch.cat(two), whole(2 * HEAD, HIDDEN))
    four = parts(4, "a.k_proj.weight", shape)
    first, second = whole(2 * HEAD, HIDDEN).split(HEAD)
    for got, want in zip(four, [first, first, second, second], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("size", [2, 4])
def test_the_vocabulary_is_rounded_up_with_zeros(size):
    table = torch.cat(parts(size, "model.embed_tokens.weight", lambda c: (c.vocab_size, HIDDEN)))
    assert len(table) == 12
    assert torch.equal(table[:VOCABULARY], whole(VOCABULARY, HIDDEN))
    assert not table[VOCABULARY:].any()


def test_biases_and_norms():
    q = parts(2, "a.q_proj.bias", lambda c: (c.heads * HEAD,))
    assert torch.equal(torch.cat(q), whole(4 * HEAD))
    first, second = parts(2, "a.o_proj.bias", lambda c: (HIDDEN,))
    assert torch.equal(first, whole(HIDDEN))
    assert not second.any()
    for norm in parts(2, "a.input_layernorm.weight", lambda c: (HIDDEN,)):
        assert torch.equal(norm, whole(HIDDEN))


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}


def of_experts(rank, size, by_expert, **changes):
    """The rank's gates, ups and downs, what it has read of them, and its declaration."""
    whole = find_model("MixtralForCausalLM").check({**SHAPE, **MIXTRAL, **changes})
    sharding, source = Sharding(whole, rank, size, by_expert), Whole()
    local = sharding.local
    taken = list(take_experts(sharding.weights(source), local.experts, HIDDEN, "model.layers.0."))
    assert len(source.read) == 3 * 4
    return taken, source.read, local


def test_experts_are_split_by_their_size():
    for rank in range(2):
        taken, read, local = of_experts(rank, 2, False)
        assert (local.experts.held, local.experts.inner_size) == (4, INNER // 2)
        assert sum(read.values()) == 4 * 3 * HIDDEN * INNER // 2
        for gate, up, down in taken:
            assert torch.equal(gate, whole(INNER, HIDDEN).chunk(2)[rank])
            assert torch.equal(up, gate)
            assert torch.equal(down, whole(HIDDEN, INNER).chunk(2, 1)[rank])


def test_experts_are_dealt_whole():
    for rank in range(2):
        taken, read, local = of_experts(rank, 2, True)
        assert (local.experts.first, local.experts.held) == (2 * rank, 2)
        assert local.experts.inner_size == INNER
        here = {name for name, size in read.items() if size}
        assert {name.split(".")[5] for name in here} == {str(2 * rank), str(2 * rank + 1)}
        assert len(taken) == 2
        for gate, _, down in taken:
            assert torch.equal(gate, whole(INNER, HIDDEN))
            assert torch.equal(down, whole(HIDDEN, INNER))


@pytest.mark.parametrize(("rank", "here"), [(0, [0, 1, 2]), (1, [0, 1, 3])])
def test_redundant_experts_are_the_first_ones(rank, here):
    config = find_model("MixtralForCausalLM").check({**SHAPE, **MIXTRAL})
    sharding, source = Sharding(config, rank, 2, True, redundant=2), Whole()
    local = sharding.local.experts
    assert (sharding.place, local.held) == (rank, 3)
    assert sharding.placement[rank].tolist() == here
    taken = list(take_experts(sharding.weights(source), local, HIDDEN, "model.layers.0."))
    assert len(taken) == 3
    assert all(torch.equal(gate, whole(INNER, HIDDEN)) for gate, _, _ in taken)
    read = {int(name.split(".")[5]) for name, size in source.read.items() if size}
    assert sorted(read) == here


@pytest.mark.parametrize(
    ("redundant", "dealt", "words"),
    [
        (1, None, "num_redundant_experts = 1: with 4 experts and 2 ranks it must be 0 or some"),
        (6, None, "= 6: with 4 experts and 2 ranks .* 2 more, up to 4$"),
        (2, (0, 3), "= 1: with 4 experts and 3 ranks it must be 2 or some times 3 more, up to 8$"),
    ],
)
def test_redundant_experts_that_do_not_fit(redundant, dealt, words):
    config = find_model("MixtralForCausalLM").check({**SHAPE, **MIXTRAL})
    if dealt is not None:
        Sharding(config, 0, 1, True, dealt, redundant)
        redundant -= 1
    with pytest.raises(ConfigError, match=words):
        Sharding(config, 0, 1 if dealt else 2, True, dealt, redundant)


def test_every_rank_has_the_router():
    for by_expert in (False, True):
        config = find_model("MixtralForCausalLM").check({**SHAPE, **MIXTRAL})
        weights = Sharding(config, 1, 2, by_expert).weights(Whole())
        gate = weights.take("model.layers.0.block_sparse_moe.gate.weight", (4, HIDDEN))
        assert torch.equal(gate, whole(4, HIDDEN))


@pytest.mark.parametrize(
    ("by_expert", "changes", "size", "reason"),
    [
        (False, {"intermediate_size": 10}, 4, "experts of size 10 can't be split so; .* 1, 2$"),
        (True, {"num_local_experts": 6}, 4, "and 6 experts can't be split so; .* 1, 2$"),
    ],
)
def test_numbers_of_experts_that_work_are_named(by_expert, changes, size, reason):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size = {size}: .*{reason}"):
        of_experts(0, size, by_expert, **changes)


def test_dealt_experts_may_have_any_size():
    assert of_experts(1, 2, True, intermediate_size=7)[2].experts.held == 2


def test_one_rank_has_nobody_to_deal_experts_to():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 1; with experts dealt it takes"):
        of_experts(0, 1, True)


def test_a_dense_model_has_no_experts_to_deal():
    with pytest.raises(ConfigError, match="enable_expert_parallel = True: this model is dense"):
        Sharding(declared(), 0, 2, by_expert=True)


def test_a_rank_reads_its_part_only():
    source = Whole()
    sharding = Sharding(declared(), 3, 4)
    sharding.weights(source).take("a.down_proj.weight", (HIDDEN, INNER // 4))
    sharding.weights(source).take("lm_head.weight", (3, HIDDEN))
    assert source.read == {"a.down_proj.weight": HIDDEN * INNER // 4, "lm_head.weight": 2 * HIDDEN}


def test_dummy_weights_are_parts_of_the_same_whole():
    one = DummyWeights(3)
    whole = [one.take(f"{name}.weight", (INNER, HIDDEN)) for name in ("up_proj", "gate_proj")]
    for rank in range(2):
        of_rank = Sharding(declared(), rank, 2).weights(DummyWeights(3))
        for name, want in zip(("up_proj", "gate_proj"), whole, strict=True):
            got = of_rank.take(f"{name}.weight", (INNER // 2, HIDDEN))
            assert torch.equal(got, want.chunk(2)[rank])


def test_files_are_checked_against_the_whole_shape(tmp_path):
    save_file({"up_proj.weight": whole(INNER, HIDDEN)}, tmp_path / "model.safetensors")
    sharding = Sharding(declared(), 1, 2)
    got = sharding.weights(SafetensorsWeights(str(tmp_path))).take("up_proj.weight", (6, HIDDEN))
    assert torch.equal(got, whole(INNER, HIDDEN)[6:])
    save_file({"up_proj.weight": whole(INNER + 2, HIDDEN)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"has shape \[14, 6\], config.json says \[12, 6\]"):
        sharding.weights(SafetensorsWeights(str(tmp_path))).take("up_proj.weight", (6, HIDDEN))


@pytest.mark.parametrize(
    ("changes", "size", "sizes"),
    [
        ({}, 3, "1, 2, 4"),
        ({}, 8, "1, 2, 4"),
        ({"intermediate_size": 10}, 4, "1, 2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "1, 3, 6"),
    ],
)
def test_sizes_that_work_are_named(changes, size, sizes):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size = {size}: .* takes {sizes}$"):
        Sharding(declared(**changes), 0, size)
    for number in map(int, sizes.split(", ")):
        Sharding(declared(**changes), number - 1, number)

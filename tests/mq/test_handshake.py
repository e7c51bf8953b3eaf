"""Who is welcome, with what, and why others aren't."""

from __future__ import annotations

import msgspec
import pytest

from ringcast.mq.config import EngineConfig, ModelSpec, build
from ringcast.mq.handshake import (
    ALIKE,
    ALIKE_IN_NODES,
    ALIKE_IN_STEP,
    FROM_MASTER,
    PROTOCOL,
    Hello,
    Master,
    NodesMaster,
    values_of,
)

ENGINE = build(EngineConfig, {"device": "fake", "data_parallel_size": 4, "seed": 3})
SPEC = ModelSpec(
    name="m",
    path="",
    tokenizer_path="",
    architecture="A",
    vocab_size=9,
    max_model_len=77,
    eos_token_ids=[],
    hf_config={},
)
MASTER = Master(
    version="1.0",
    session="now",
    rank=2,
    local=(0, 2),
    engine=ENGINE,
    spec=SPEC,
    fingerprint="abc",
)


def hello(**fields) -> Hello:
    whole = {
        "protocol": PROTOCOL,
        "version": "1.0",
        "nonce": "n",
        "node": "a",
        "attach": False,
        "session": "",
        "start_rank": 2,
        "num_ranks": 2,
        "model": "other",
        "fingerprint": "abc",
        "options": values_of(ENGINE, (*ALIKE, *ALIKE_IN_STEP)),
    }
    return Hello(**{**whole, **fields})


def test_a_fitting_node_is_welcome_and_gets_the_masters_options():
    assert MASTER.refusal(hello(), "") is None
    welcome = MASTER.welcome(hello(), epoch=5, now=12.5)
    assert (welcome.nonce, welcome.session, welcome.epoch, welcome.clock) == ("n", "now", 5, 12.5)
    assert welcome.max_model_len == 77
    assert welcome.options["seed"] == 3
    assert set(welcome.options) == set(FROM_MASTER)


def test_options_are_those_of_an_engine():
    fields = {field.name for field in msgspec.structs.fields(EngineConfig)}
    assert set(FROM_MASTER) | set(ALIKE) <= fields
    assert not set(FROM_MASTER) & set(ALIKE)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"protocol": PROTOCOL + 1}, "protocol"),
        ({"version": "0.9"}, "the node has ringcast 0.9"),
        ({"start_rank": 3}, "ranks 3 to 4 are not among the 0 to 3 of --data-parallel-size 4"),
        ({"num_ranks": 0}, "not among"),
        ({"start_rank": 1}, "the master has rank 1 itself; see --data-parallel-start-rank"),
        ({"start_rank": 3, "num_ranks": 1}, "this is the gateway of rank 2, not 3"),
        ({"fingerprint": "abd"}, "the node's model 'other' is not the master's 'm'"),
        ({"options": {}}, "logits_processors = None on the node and"),
        (
            {"options": {name: getattr(ENGINE, name) for name in ALIKE} | {"device": "cpu"}},
            "device = 'cpu' on the node and 'fake' on the master",
        ),
    ],
)
def test_who_is_of_another_kind_is_refused_for_good(fields, reason):
    refused = MASTER.refusal(hello(**fields), "")
    assert refused is not None
    assert reason in refused.reason
    assert refused.then == "give up"
    assert refused.nonce == "n"


def test_a_rank_that_is_served_may_be_free_again():
    refused = MASTER.refusal(hello(), "node b")
    assert refused is not None
    assert refused.then == "ask again"
    assert refused.reason == "rank 2 is served by node b"


def test_who_attaches_must_have_joined_in_this_session():
    assert MASTER.refusal(hello(attach=True, session="now"), "") is None
    refused = MASTER.refusal(hello(attach=True, session="before"), "")
    assert refused is not None
    assert refused.then == "join again"


def test_only_who_steps_with_others_needs_as_many_ranks_in_each_replica():
    other = hello(options={**hello().options, "tensor_parallel_size": 2})
    assert MASTER.refusal(other, "") is None
    together = msgspec.structs.replace(ENGINE, enable_expert_parallel=True)
    master = msgspec.structs.replace(MASTER, engine=together)
    other.options["enable_expert_parallel"] = True
    refused = master.refusal(other, "")
    assert refused is not None
    assert "tensor_parallel_size = 2 on the node and 1 on the master" in refused.reason
    assert "enable_expert_parallel = False on the node" in master.refusal(hello(), "").reason
    other.options.update(tensor_parallel_size=1, eplb_config={"num_redundant_experts": 1})
    assert "eplb_config = " in master.refusal(other, "").reason
    other.options.update(eplb_config=hello().options["eplb_config"], enforce_eager=True)
    assert "enforce_eager = True on the node" in master.refusal(other, "").reason


# Nodes that share one engine


SHARED = build(EngineConfig, {"device": "fake", "tensor_parallel_size": 4})
OF_SHARED = values_of(SHARED, ALIKE_IN_NODES)


@pytest.mark.parametrize(
    ("fields", "options", "reason"),
    [
        ({}, {}, ""),
        ({"start_rank": 1}, {}, "this is the gateway of node 2, not 1"),
        ({}, {"nnodes": 2}, "nnodes = 2 on the node and 4 on the master: must be alike"),
        ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size = 2 on the node and 4"),
        ({}, {"enable_eplb": True}, "enable_eplb = True on the node and False on the master"),
        ({}, {"enforce_eager": True}, "enforce_eager = True on the node and False on the master"),
        ({"fingerprint": "x"}, {}, "their files differ"),
    ],
)
def test_who_may_share_an_engine(fields, options, reason):
    master = NodesMaster(**{f: getattr(MASTER, f) for f in MASTER.__struct_fields__}, nnodes=4)
    master = msgspec.structs.replace(master, engine=SHARED)
    knocks = hello(**{"num_ranks": 1, "options": OF_SHARED | {"nnodes": 4} | options, **fields})
    refused = master.refusal(knocks, "")
    assert reason in refused.reason if reason else refused is None
    if not reason:
        again = master.refusal(knocks, "node b")
        assert (again.reason, again.then) == ("node 2 is served by node b", "ask again")


def test_a_replica_is_none_of_them():
    master = NodesMaster(**{f: getattr(MASTER, f) for f in MASTER.__struct_fields__}, nnodes=4)
    assert "nnodes = None on the node" in master.refusal(hello(), "").reason

"""On another host than its peers, a scheduler hears of their deaths as of anything else."""

from __future__ import annotations

from ringcast.actors.scheduler.core import SchedulerCore
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.sampling_params import SamplingParams

SPEC = ModelSpec(
    name="fake",
    path="",
    tokenizer_path="",
    architecture="Fake",
    vocab_size=1000,
    max_model_len=512,
    eos_token_ids=[2],
    hf_config={},
)


def make_core() -> SchedulerCore:
    core = SchedulerCore(EngineConfig(device="fake"), SPEC)
    for client in (0, 1):
        request = messages.AddRequest(
            request_id=f"of {client}",
            incarnation=0,
            prompt_token_ids=codec.pack([300, 301]),
            params=SamplingParams(max_tokens=5, seed=1),
            output=messages.OutputSpec(client=client),
            arrival=0.0,
        )
        core.handle("tokenizer.0", request, 0.0)
    opened = [send.message for send in core.flush(0.0)]
    assert [type(message) for message in opened] == [messages.OpenStream] * 2
    return core


def ends_of(core: SchedulerCore, source: str, message) -> list[int]:
    """The streams that it ends, which are told before the answer, and the answer last."""
    core.handle(source, message, 1.0)
    *steps, answer = (send.message for send in core.flush(1.0))
    assert answer == messages.PeersGoneHeard(message.death)
    return [end.stream for step in steps for end in step.ends]


def test_a_lost_detokenizer_ends_all_streams():
    gone = messages.PeersGone(3, ["detokenizer.0"])
    assert ends_of(make_core(), "detokenizer.0", gone) == [0, 1]


def test_a_lost_client_ends_its_own():
    core = make_core()
    assert ends_of(core, "tokenizer.0", messages.PeersGone(4, ["client.1"])) == [1]
    core.handle("tokenizer.0", messages.AbortClient(1), 2.0)
    assert core.num_unfinished == 1


def test_who_is_nothing_to_it_is_answered_all_the_same():
    core = make_core()
    assert ends_of(core, "tokenizer.0", messages.PeersGone(5, ["tokenizer.0"])) == []
    assert core.num_unfinished == 2

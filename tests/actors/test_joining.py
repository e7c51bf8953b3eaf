"""A node asks until its master has said what to do, and for no longer than it may."""

from __future__ import annotations

import asyncio

import pytest

from ringcast.actors import joining
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.errors import ConfigError, JoinAgainError, NoMasterError
from ringcast.mq.handshake import Refused, Welcome
from ringcast.mq.link import LinkDialer

ENGINE = EngineConfig(device="fake", data_parallel_size=4)
SPEC = ModelSpec(
    name="m",
    path="",
    tokenizer_path="",
    architecture="A",
    vocab_size=9,
    max_model_len=7,
    eos_token_ids=[],
    hf_config={},
)
SOON = 10.0


class Dialer:
    """Answers as it is told to. None is no answer."""

    target = "10.0.0.1:29550"

    def __init__(self, *answers):
        self._answers = list(answers)
        self.nonces = []

    async def join(self, hello, timeout):
        self.nonces.append(hello.nonce)
        answer = self._answers.pop(0)
        if answer is None:
            raise TimeoutError
        return answer


WELCOME = Welcome("n", "s", 1.0, 1, 7, {})


def ask(dialer: Dialer | LinkDialer, timeout: float = SOON):
    said: list[str] = []
    hello = joining.hello_of(ENGINE, SPEC, range(1, 3))
    try:
        return asyncio.run(joining.join(dialer, hello, timeout, said.append)), said
    except Exception as error:
        return error, said


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(joining, "_AGAIN_SECONDS", 0.0)


def test_what_a_host_says_of_itself():
    hello = joining.hello_of(ENGINE, SPEC, range(1, 3))
    assert (hello.start_rank, hello.num_ranks, hello.attach) == (1, 2, False)
    assert hello.options["data_parallel_size"] == 4
    attaching = joining.hello_of(ENGINE, SPEC, range(1, 2), session="s")
    assert (attaching.attach, attaching.session) == (True, "s")


def test_it_asks_until_it_is_welcome_and_tells_each_reason_once():
    busy = Refused("n", "rank 1 is served by node b", "ask again")
    dialer = Dialer(None, busy, None, busy, WELCOME)
    answer, said = ask(dialer)
    assert answer == WELCOME
    assert len(set(dialer.nonces)) == 5
    assert len(said) == 2
    assert "no answer from 10.0.0.1:29550 yet: is the master up, and is the cluster" in said[0]
    assert "rank 1 is served by node b; asking again" in said[1]


def test_a_refusal_is_the_users_mistake():
    error, _ = ask(Dialer(Refused("n", "another model")))
    assert isinstance(error, ConfigError)
    assert str(error) == "the master at 10.0.0.1:29550 refuses: another model"


def test_another_session_means_joining_again():
    error, _ = ask(Dialer(Refused("n", "started anew", "join again")))
    assert isinstance(error, JoinAgainError)
    assert error.exit_code == 75


def test_it_gives_up_in_time():
    error, _ = ask(Dialer(*[None] * 100_000), 0.02)
    assert isinstance(error, NoMasterError)
    assert "no answer from 10.0.0.1:29550 for 0.02 s (--data-parallel-join-timeout)" in str(error)

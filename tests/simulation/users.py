"""Those who send requests, take the answers late, and abort. Each knows what it must get.

The only doors into the shipped frontend are the public ones: `EngineClient.submit`, the handle's
`abort` and `discard`, and the mailbox.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ringcast.actors.text.logprob_rows import unpack_rows
from ringcast.frontend.handle import RequestHandle
from ringcast.frontend.mailbox import Mailbox
from ringcast.mq import codec, messages
from ringcast.mq.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PoisonousRequestError,
    RingcastError,
)

from . import reference
from .client_node import ClientNode
from .scenario import Wish

if TYPE_CHECKING:
    from .world import World

_RETRY = 0.05  # seconds


class Inbox(Mailbox):
    """A mailbox that says when there is something to take, for want of an event loop."""

    def __init__(self, user: User) -> None:
        super().__init__()
        self._user = user
        self._woken = user.woken
        self._fresh = False

    def put(self, chunk: messages.Chunk) -> None:
        assert not (self._user.aborted and self._user.wish.discard), "a chunk came after discard"
        super().put(chunk)
        self._fresh = True
        self._woken()

    def close_one(self, error: RingcastError | None = None) -> None:
        super().close_one(error)
        self._woken()

    def take_now(self) -> list[messages.Chunk] | None:
        """As `take`; None where that would wait."""
        if not self._fresh and self.num_open:
            return None
        self._fresh = False
        try:
            self.take().send(None)
        except StopIteration as taken:
            chunks: list[messages.Chunk] = taken.value
            return chunks
        raise AssertionError("take() waits although there is something to take")


class Choice:
    """What a user has of one choice."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.events: list[dict[str, Any]] = []
        self.logprob_tokens: list[int] = []
        self.finish: messages.Finish | None = None
        self.shown = 0  # tokens up to the last event


class User:
    """state: "waiting" (to send), "open", and at the end "ended", "failed" (see `error`), "refused"
    (never taken) or "lost" (its client died).
    """

    def __init__(self, world: World, number: int, wish: Wish) -> None:
        self.wish = wish
        self.number = number
        self.state = "waiting"
        self.error: RingcastError | None = None
        self.handle: RequestHandle | None = None
        self.aborted = False
        self.choices = [Choice() for _ in range(wish.params.n)]
        self.num_kills = 0  # of its poison
        self._world = world
        self._node: ClientNode | None = None
        self._reading = False
        self._rendered = wish.output.delta and wish.output.form != "raw"

    @property
    def done(self) -> bool:
        return self.state not in ("waiting", "open")

    # Acting

    def come(self) -> None:
        """Send the request as soon as its client takes it."""
        node = self._world.supervisor.nodes.get(f"client.{self.wish.client}")
        if self._world.supervisor.exit_code is not None:
            self.state = "refused"
        elif isinstance(node, ClientNode) and node.takes_requests:
            node.order(lambda: self._submit(node))
            self._node = node
        else:
            self._world.clock.after(_RETRY, self.come)

    def client_died(self, node: ClientNode) -> None:
        if node is self._node and not self.done:
            if self.state == "open":
                self.state = "lost"
            else:  # it had not been taken
                self._world.clock.after(_RETRY, self.come)
            self._node = None

    def _submit(self, node: ClientNode) -> None:
        wish = self.wish
        try:
            self.handle = node.client.submit(
                wish.prompt,
                wish.params,
                wish.output,
                cache_salt=wish.salt,
                mailbox=Inbox(self),
                priority=wish.priority,
            )
        except OverloadedError:
            self._node = None
            if node.client.draining:
                self.state = "refused"
            else:
                self._world.clock.after(_RETRY, self.come)
            return
        except EngineDeadError:
            self.state = "refused"
            return
        self.state = "open"
        self._world.by_request[self.handle.request_id] = self
        if wish.abort_at is not None:
            self._world.clock.after(wish.abort_at, node.order, self._abort)

    def _abort(self) -> None:
        assert self.handle is not None
        if self.handle.open:
            self.aborted = True
            if self.wish.discard:
                self.handle.discard()
            else:
                self.handle.abort()

    # Reading

    def woken(self) -> None:
        if not self._reading:
            self._reading = True
            self._world.clock.after(self.wish.patience, self._read)

    def _read(self) -> None:
        self._reading = False
        assert self.handle is not None
        if self.state != "open":
            return
        inbox = self.handle.mailbox
        assert isinstance(inbox, Inbox)
        try:
            while (chunks := inbox.take_now()) is not None:
                for chunk in chunks:
                    self._hear(chunk)
                if not chunks:
                    self.state = "ended"
                    return
        except RingcastError as error:
            self.state, self.error = "failed", error
            self._world.trace.note(f"user {self.number} failed: {error}")

    def _hear(self, chunk: messages.Chunk) -> None:
        choice = self.choices[chunk.choice]
        assert choice.finish is None, f"a chunk came after the end of {self.describe(chunk.choice)}"
        if self._rendered and chunk.first_index < len(choice.tokens):
            # A takeover made again what had not been shown.
            assert chunk.first_index == choice.shown, "shown tokens came again"
            del choice.tokens[choice.shown :]
        assert chunk.first_index == len(choice.tokens), (
            f"tokens from {chunk.first_index} came after {len(choice.tokens)}"
        )
        ids = codec.ints(chunk.token_ids).tolist()
        choice.tokens += ids
        choice.text += chunk.text
        choice.finish = chunk.finish
        if chunk.data:
            choice.shown = len(choice.tokens)
            choice.events.append(json.loads(chunk.data.removeprefix(b"data: ")))
        if chunk.logprobs is not None:
            rows = unpack_rows(chunk.logprobs, chunk.logprob_tokens, chunk.first_index)
            assert [row.place for row in rows] == [chunk.first_index + i for i in range(len(ids))]
            choice.logprob_tokens += [row.token_ids[0] for row in rows]

    # Judging

    def describe(self, choice: int) -> str:
        return f"choice {choice} of user {self.number} ({self.wish.params})"

    def check(self) -> None:
        """At the end of a run."""
        assert self.done, f"user {self.number} still waits ({self.state})"
        if self.state == "failed":
            self._check_error()
        if self.state != "refused" and not isinstance(self.error, InvalidRequestError):
            for number in range(len(self.choices)):
                self._check_choice(number)

    def _check_error(self) -> None:
        world, error = self._world, self.error
        if isinstance(error, PoisonousRequestError):
            self._check_poisonous()
        elif isinstance(error, InvalidRequestError):
            scenario = world.scenario
            most = min(scenario.spec.max_model_len - 1, scenario.num_slots)
            too_long = len(self.wish.prompt_ids) > most - self.wish.params.min_tokens
            assert too_long, f"user {self.number} was refused: {error}"
        else:
            assert isinstance(error, EngineDeadError), f"user {self.number} failed: {error!r}"
            assert world.may_fail, f"user {self.number} failed: {error!r}"

    def _check_poisonous(self) -> None:
        world = self._world
        if world.num_other_deaths or world.num_poisonous > 1:
            return
        assert self.wish.poison is not None, f"user {self.number} is innocent: {self.error}"
        assert self.num_kills == 2, f"{self.num_kills} deaths by user {self.number}"

    def _check_choice(self, number: int) -> None:
        """Its tokens and its text are the reference's, all of them or, if something ended it, the
        first.
        """
        wish, choice, scenario = self.wish, self.choices[number], self._world.scenario
        if len(wish.prompt_ids) > min(scenario.spec.max_model_len - 1, scenario.num_slots):
            return
        answer = reference.answer(
            wish.prompt_ids, number, wish.params, scenario.spec, scenario.num_slots
        )
        who = self.describe(number)
        assert choice.tokens == answer.tokens[: len(choice.tokens)], f"wrong tokens: {who}"
        if choice.finish is None:
            assert self.state in ("failed", "lost") or (self.aborted and wish.discard), (
                f"no end came: {who}"
            )
        elif choice.finish.reason == "abort":
            assert self.aborted or self._world.may_fail, f"aborted by nobody: {who}"
        else:
            self._check_whole(number, answer)
        if wish.poison is not None:
            assert len(choice.tokens) <= wish.poison, f"poison did not kill: {who}"

    def _check_whole(self, number: int, answer: reference.Answer) -> None:
        choice, finish, who = (
            self.choices[number],
            self.choices[number].finish,
            self.describe(number),
        )
        assert finish is not None
        assert finish.reason == answer.reason, f"{finish} instead of {answer}: {who}"
        assert finish.stop_reason == answer.stop_reason, f"{finish} instead of {answer}: {who}"
        assert choice.tokens == answer.tokens, f"tokens are missing: {who}"
        assert finish.num_output_tokens == len(answer.tokens)
        assert finish.num_prompt_tokens == len(self.wish.prompt_ids)
        if not self._rendered:
            assert choice.text == answer.text, f"{choice.text!r}, not {answer.text!r}: {who}"
            if self.wish.params.logprobs is not None:
                assert choice.logprob_tokens == answer.tokens, f"wrong logprobs: {who}"
            return
        text = "".join(_text_of(event) for event in choice.events)
        assert text == answer.text, f"{text!r}, not {answer.text!r}: {who}"
        ends = [event["choices"][0]["finish_reason"] for event in choice.events]
        assert ends == [None] * (len(ends) - 1) + [answer.reason], f"wrong ends {ends}: {who}"
        if self.wish.output.form == "chat":
            roles = ["role" in event["choices"][0]["delta"] for event in choice.events]
            assert roles == [True] + [False] * (len(roles) - 1), f"wrong roles: {who}"
        if self.wish.params.logprobs is not None:
            places = [_num_logprobs(event) for event in choice.events]
            assert sum(places) == len(answer.tokens), f"wrong logprobs in events: {who}"


def _text_of(event: dict[str, Any]) -> str:
    (choice,) = event["choices"]
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


def _num_logprobs(event: dict[str, Any]) -> int:
    logprobs = event["choices"][0]["logprobs"]
    if logprobs is None:
        return 0
    return len(logprobs["content"] if "content" in logprobs else logprobs["tokens"])

"""What may be said: every message is held against the protocol of mq/messages.py as it is sent.

What actors drop in silence (a second end, a token seen before, a late abort) is no harm to a user
and yet a mistake of whoever sent it, so it is looked for here. `batch` holds what a core was given
against what it had sent when it committed: by then all that follows from it must have been said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringcast.mq import codec, messages

if TYPE_CHECKING:
    from .node import Node
    from .world import World


class Stream:
    """What a scheduler has said of one stream, to one detokenizer.

    heard: the incarnation of that detokenizer that has it open, or -1.
    """

    def __init__(self, opened: messages.OpenStream, to: str) -> None:
        self.opened = opened
        self.to = to
        self.key = (opened.request_id, opened.incarnation, opened.choice)
        self.num_tokens = len(opened.resumed) // 4
        self.ended = False
        self.heard = -1


class Wire:
    def __init__(self, world: World) -> None:
        self._world = world
        # By the scheduler, its generation, and the stream's number.
        self._streams: dict[tuple[str, int, int], Stream] = {}
        self._said: dict[tuple[str, int, int], int] = {}  # tokens in chunks so far; -1: finished
        self._incarnations: dict[str, int] = {}
        self._detokenizers: dict[tuple[str, int], str] = {}  # by request and incarnation
        self._bearers: dict[tuple[str, int, str], Node] = {}  # the tokenizer that had brought it
        self._aborted: dict[tuple[str, int, str], int] = {}  # by scheduler: up to this incarnation
        self._losses: dict[
            str, dict[str, int]
        ] = {}  # by request: what its client knew when it went

    # As it is sent

    def sent(self, node: Node, to: str, message: Any, payload: bytes) -> None:
        self._world.trace.note(f"{node.name} > {to}", payload, message)
        match message:
            case messages.OpenStream():
                self._open(node, to, message)
            case messages.StreamStep():
                self._step(node, to, message)
            case messages.AddRequest(request_id=request_id, incarnation=incarnation):
                self._bearers[request_id, incarnation, to] = node
            case messages.Chunks(chunks=chunks):
                for chunk in chunks:
                    assert to == f"client.{self._client_of(chunk.request_id)}"
                    self._chunk(chunk)
            case messages.Generate():
                assert to == f"tokenizer.{message.tokenizer}"
                self._generate(node, message)
            case messages.Abort(request_id=request_id, incarnation=incarnation):
                # The next incarnation may be waiting to be sent.
                newest = self._incarnations[request_id] + 1
                assert incarnation <= newest, f"{request_id}: an abort of what isn't sent"

    def _client_of(self, request_id: str) -> int:
        return self._world.by_request[request_id].wish.client

    def _open(self, node: Node, to: str, opened: messages.OpenStream) -> None:
        key = (node.name, node.generation, opened.stream)
        assert key not in self._streams, f"stream {opened.stream} is opened twice"
        stream = self._streams[key] = Stream(opened, to)
        wanted = self._detokenizers[opened.request_id, opened.incarnation]
        assert to == wanted, f"{stream.key} is opened at {to}, not {wanted}"
        same = [s for k, s in self._streams.items() if k[:2] == key[:2] and s.key == stream.key]
        assert len(same) == 1, f"{stream.key} is opened twice"

    def _step(self, node: Node, to: str, step: messages.StreamStep) -> None:
        streams, indices = codec.longs(step.streams).tolist(), codec.ints(step.token_index).tolist()
        for number, index in zip(streams, indices, strict=True):
            stream = self._streams[node.name, node.generation, number]
            assert stream.to == to, f"{stream.key} speaks to {to}"
            assert not stream.ended, f"{stream.key} speaks after its end"
            assert index == stream.num_tokens, f"{stream.key}: token {index} is out of turn"
            stream.num_tokens += 1
        for end in step.ends:
            stream = self._streams[node.name, node.generation, end.stream]
            assert stream.to == to, f"{stream.key} ends at {to}"
            assert not stream.ended, f"{stream.key} ends twice"
            assert end.num_tokens <= stream.num_tokens
            stream.ended = True

    def _chunk(self, chunk: messages.Chunk) -> None:
        key = (chunk.request_id, chunk.incarnation, chunk.choice)
        num_tokens = len(chunk.token_ids) // 4
        said = self._said.get(key, chunk.first_index)
        assert said >= 0, f"{key}: a chunk after the last"
        assert chunk.first_index == said, f"{key}: a chunk at {chunk.first_index}, not at {said}"
        finished = chunk.finish is not None
        assert finished or num_tokens or chunk.text, f"{key}: an empty chunk"
        self._said[key] = -1 if finished else said + num_tokens

    def _generate(self, node: Node, message: messages.Generate) -> None:
        self._has_reason(node, message)
        request_id, incarnation = message.request_id, message.incarnation
        assert incarnation > self._incarnations.get(request_id, -1), f"{request_id}: sent again"
        self._incarnations[request_id] = incarnation
        self._detokenizers[request_id, incarnation] = f"detokenizer.{message.detokenizer}"
        user = self._world.by_request.get(request_id)
        if user is None:  # it is being submitted
            assert not message.resume
            return
        assert not (user.aborted and user.handle is not None and not user.handle.open)
        if not self._world.num_other_deaths and self._world.num_poisonous == 1:
            assert user.num_kills <= 1, "poison is tried a third time"

    def _has_reason(self, node: Node, message: messages.Generate) -> None:
        """Nothing is sent again but for the death of what it was with: not of another replica."""
        losses = node.losses
        names = (
            f"scheduler.{message.engine}",
            f"tokenizer.{message.tokenizer}",
            f"detokenizer.{message.detokenizer}",
        )
        before = self._losses.get(message.request_id)
        if before is not None:
            changed = [name for name, times in before.items() if losses[name] != times]
            assert changed, f"{message.request_id} was disturbed for nothing"
        self._losses[message.request_id] = {name: losses[name] for name in names}

    # When a batch is done

    def batch(
        self,
        node: Node,
        arrived: Sequence[tuple[str, Any]],
        sent: Sequence[tuple[str, Any]],
    ) -> None:
        kind = node.name.partition(".")[0]
        received = [message for _, message in arrived]
        if kind == "tokenizer":
            self._tokenized(received, [message for _, message in sent])
        elif kind == "scheduler":
            self._scheduled(node, arrived)
        elif kind == "detokenizer":
            self._detokenized(node, arrived)

    def _tokenized(self, received: Sequence[Any], sent: Sequence[Any]) -> None:
        def count(kind: Any, of: Any) -> int:
            return sum(
                isinstance(message, kind)
                and (message.request_id, message.incarnation) == (of.request_id, of.incarnation)
                for message in sent
            )

        for message in received:
            if isinstance(message, messages.Generate):
                added, accepted = (
                    count(messages.AddRequest, message),
                    count(messages.Accepted, message),
                )
                rejected = count(messages.Rejected, message)
                assert added + rejected == 1, f"{message}: {sent}"
                assert accepted == added
            elif isinstance(message, messages.Abort):
                repeated = received.count(message)
                assert count(messages.AbortRequest, message) == repeated, f"{message} was lost"
            else:
                assert message in sent, f"{message} was lost"

    def _scheduled(self, node: Node, arrived: Sequence[tuple[str, Any]]) -> None:
        for place, (source, message) in enumerate(arrived):
            match message:
                case messages.AbortRequest(request_id=request_id, incarnation=incarnation):
                    self._all_ended(node, request_id, lambda s, n=incarnation: s.incarnation <= n)
                    key = node.name, node.generation, request_id
                    self._aborted[key] = max(incarnation, self._aborted.get(key, -1))
                case messages.AddRequest(request_id=request_id, incarnation=incarnation):
                    self._check_order(node, request_id, incarnation)
                    self._all_ended(node, request_id, lambda s, n=incarnation: s.incarnation < n)
                case messages.AbortClient(client=client):
                    self._client_gone(node, client, source, arrived[place:])

    def _client_gone(
        self, node: Node, client: int, tokenizer: str, then: Sequence[tuple[str, Any]]
    ) -> None:
        """What it had sent by this tokenizer ends. Its next incarnation may have sent some more."""
        added = [message for _, message in then if isinstance(message, messages.AddRequest)]
        fresh = {(message.request_id, message.incarnation) for message in added}

        def is_old(opened: messages.OpenStream) -> bool:
            key = opened.request_id, opened.incarnation
            by = self._bearers[(*key, node.name)].name
            return opened.output.client == client and by == tokenizer and key not in fresh

        self._all_ended(node, None, is_old)

    def _check_order(self, node: Node, request_id: str, incarnation: int) -> None:
        """An abort overtakes at most what a dead tokenizer has left behind, and another follows."""
        aborted = self._aborted.get((node.name, node.generation, request_id), -1)
        bearer = self._bearers[request_id, incarnation, node.name]
        overtaken = incarnation <= aborted and bearer.state != "dead"
        assert not overtaken, f"{request_id} is overtaken by its abort"

    def _all_ended(self, node: Node, request_id: str | None, which: Any) -> None:
        for (name, generation, _), stream in self._streams.items():
            if (
                (name, generation) == (node.name, node.generation)
                and request_id in (None, stream.opened.request_id)
                and which(stream.opened)
            ):
                assert stream.ended, f"{stream.key} goes on"

    def _detokenized(self, node: Node, arrived: Sequence[tuple[str, Any]]) -> None:
        # Its scheduler may have died meanwhile, and another one may use the same numbers.
        for source, message in arrived:
            streams = [stream for key, stream in self._streams.items() if key[0] == source]
            if isinstance(message, messages.OpenStream):
                for stream in streams:
                    if stream.opened == message and stream.to == node.name:
                        stream.heard = node.generation
            for end in message.ends if isinstance(message, messages.StreamStep) else ():
                for stream in streams:
                    of_it = stream.opened.stream == end.stream and stream.to == node.name
                    if of_it and stream.heard == node.generation:
                        passed_on = self._said[stream.key] == -1
                        assert passed_on, f"{stream.key}: its end was not passed on"

    # Deaths

    def forgot(self, node: Node, lost: Sequence[str], sent: Sequence[Any]) -> None:
        """A core has acted on PeerLost."""
        clients = {int(name[7:]) for name in lost if name.startswith("client.")}
        if node.name.startswith("tokenizer."):
            told = Counter(m.client for m in sent if isinstance(m, messages.AbortClient))
            for client in clients:
                replicas = self._world.supervisor.life.num_replicas
                assert told[client] >= replicas, f"nobody ends what {lost} had sent"
        elif node.name.startswith("scheduler."):
            for (name, generation, _), stream in self._streams.items():
                if (name, generation) != (node.name, node.generation) or stream.ended:
                    continue
                assert stream.to not in lost, f"{stream.key} outlives its detokenizer"
                assert stream.opened.output.client not in clients, f"{stream.key} goes on alone"
        elif node.name.startswith("detokenizer."):
            for (name, _, _), stream in self._streams.items():
                if name in lost:
                    stream.heard = -1

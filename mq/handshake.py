"""How a node joins a master: what they say to each other before a link carries records.

A node with ranks s to s + n - 1 asks the master's gateway of rank s first, then starts its engines,
and then the gateway of each rank attaches to the master's gateway of that rank:

    node -> master     Hello(attach=False): may I?      before anything is loaded
    master -> node     Welcome: with these options and in this session; or Refused
    node -> master     Hello(attach=True), once the engine works
    master -> node     Welcome: the link is made, and is called `epoch`; or Refused

Where hosts share one engine (nnodes), "rank" is the node's number: there is one gateway for each
node, and a node attaches at once, since its workers load together with the others. What its link
carries is the plans, the workers' answers, and what ranks tell each other (executor/mirror.py).

A session is one life of the master's supervisor, or where replicas step together one life of all of
them. Who attaches has joined in the same session, so it has that session's options and clock; a
node that joined an earlier one is refused, and joins again. The mirror of a node whose replicas
step with others attaches first, and for all of its ranks, to the master's mirror.
A Hello is repeated until it is answered, so its answer may come twice: `nonce` tells which it is.

Who is refused may be welcome another time: `then` says what to do.

On the link (link_core.py) the two say:

    master -> node     PeersGone: these actors of the master's host are dead (messages.py)
    node -> master     Statistics of the scheduler, which the master's gateway publishes as its own
    node -> master     Bye: this end goes, and why; nothing comes after it
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .config import EngineConfig, ModelSpec
from .message import Message
from .messages import PeersGone as PeersGone
from .supervision import Statistics as Statistics

PROTOCOL = 1

# What a node takes from its master, whatever its own command line says: all that decides which
# tokens come out, what clients are told that the engines can do, and whom its schedulers talk to.
FROM_MASTER = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "deterministic",
    "pooling_type",
    "load_format",
    "seed",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "max_steps_in_flight",
    "block_size",
    "enable_prefix_caching",
    "prefix_caching_hash_algo",
    "step_timeout",
    "tokenizer_count",
    "detokenizer_count",
)
# What a node has to be given alike: it is code, which a node doesn't take from elsewhere, or a
# choice of parts that have to fit.
ALIKE = (
    "logits_processors",
    "skip_tokenizer_init",
    "data_parallel_size",
    "enable_expert_parallel",
    "device",
)
# Likewise, where replicas step together.
ALIKE_IN_STEP = ("tensor_parallel_size", "enable_eplb", "eplb_config", "enforce_eager")
# Likewise, of those that share one engine; and nnodes.
ALIKE_IN_NODES = (*ALIKE, *ALIKE_IN_STEP, "pipeline_parallel_size", "enforce_eager")


class Hello(Message, tag="hello"):
    """attach: for the link of rank `start_rank` alone. num_ranks: that this node has. session: that
    it joined, "" before. options: those in ALIKE and ALIKE_IN_STEP, or in ALIKE_IN_NODES and
    nnodes, as this node has them."""

    protocol: int
    version: str
    nonce: str
    node: str
    attach: bool
    session: str
    start_rank: int
    num_ranks: int
    model: str
    fingerprint: str
    options: dict[str, Any]


class Welcome(Message, tag="welcome"):
    """clock: the master's `time.monotonic()` when it said this. options: those in FROM_MASTER.
    max_model_len: as the master's model has it. epoch: of the link; 0 where none was made."""

    nonce: str
    session: str
    clock: float
    epoch: int
    max_model_len: int
    options: dict[str, Any]


class Refused(Message, tag="refused"):
    """then: give up; ask again, in a while; or join again, with new engines."""

    nonce: str
    reason: str
    then: Literal["give up", "ask again", "join again"] = "give up"


class Bye(Message, tag="bye"):
    """failed: its engines have died too often; otherwise somebody wants it to end."""

    reason: str
    failed: bool = False


HandshakeMessage = Hello | Welcome | Refused
LinkMessage = PeersGone | Statistics | Bye


def values_of(engine: EngineConfig, names: tuple[str, ...]) -> dict[str, Any]:
    """As they are once they have travelled."""
    return {name: msgspec.to_builtins(getattr(engine, name)) for name in names}


class Master(msgspec.Struct, frozen=True, kw_only=True):
    """What a master's gateway of rank `rank` judges a Hello by. local: the first of the ranks
    that the master has itself, and how many these are."""

    version: str
    session: str
    rank: int
    local: tuple[int, int]
    engine: EngineConfig
    spec: ModelSpec
    fingerprint: str

    def refusal(self, hello: Hello, attached: str) -> Refused | None:
        """Why `hello` is not welcome, if it isn't. attached: the node that has this rank now, ""
        while there is none."""
        for reason in (self._of_another_kind(hello), self._of_ranks(hello), self._of_model(hello)):
            if reason:
                return Refused(hello.nonce, reason)
        if hello.attach and hello.session != self.session:
            return Refused(hello.nonce, "the master has been started anew", "join again")
        if attached:
            return Refused(hello.nonce, f"{self.what} is served by {attached}", "ask again")
        return None

    @property
    def what(self) -> str:
        return f"rank {self.rank}"

    def welcome(self, hello: Hello, epoch: int, now: float) -> Welcome:
        return Welcome(
            nonce=hello.nonce,
            session=self.session,
            clock=now,
            epoch=epoch,
            max_model_len=self.spec.max_model_len,
            options={name: getattr(self.engine, name) for name in FROM_MASTER},
        )

    def _of_another_kind(self, hello: Hello) -> str:
        if (hello.protocol, hello.version) == (PROTOCOL, self.version):
            return ""
        return (
            f"the node has ringcast {hello.version} (protocol {hello.protocol}), the master "
            f"{self.version} (protocol {PROTOCOL}): they must be the same"
        )

    def _of_ranks(self, hello: Hello) -> str:
        first, last = hello.start_rank, hello.start_rank + hello.num_ranks - 1
        size = self.engine.data_parallel_size
        if hello.num_ranks < 1 or last >= size:
            return (
                f"the node's ranks {first} to {last} are not among the 0 to {size - 1} of "
                f"--data-parallel-size {size}"
            )
        both = sorted(set(range(first, last + 1)) & set(range(self.local[0], sum(self.local))))
        if both:
            return f"the master has rank {both[0]} itself; see --data-parallel-start-rank"
        if first != self.rank:
            return f"this is the gateway of rank {self.rank}, not {first}"
        return ""

    def _of_model(self, hello: Hello) -> str:
        if hello.fingerprint != self.fingerprint:
            return (
                f"the node's model {hello.model!r} is not the master's {self.spec.name!r}: their "
                f"files differ (fingerprints {hello.fingerprint} and {self.fingerprint})"
            )
        for name, ours in self._alike().items():
            theirs = hello.options.get(name)
            if ours != theirs:
                return f"{name} = {theirs!r} on the node and {ours!r} on the master: must be alike"
        return ""

    def _alike(self) -> dict[str, Any]:
        return values_of(self.engine, (*ALIKE, *(ALIKE_IN_STEP if self.engine.lockstep else ())))


class NodesMaster(Master, frozen=True, kw_only=True):
    """The same of the gateway for node `rank` of nnodes that share one engine."""

    nnodes: int

    @property
    def what(self) -> str:
        return f"node {self.rank}"

    def _of_ranks(self, hello: Hello) -> str:
        if hello.options.get("nnodes") == self.nnodes and hello.start_rank != self.rank:
            return f"this is the gateway of node {self.rank}, not {hello.start_rank}"
        return ""

    def _alike(self) -> dict[str, Any]:
        return {"nnodes": self.nnodes, **values_of(self.engine, ALIKE_IN_NODES)}

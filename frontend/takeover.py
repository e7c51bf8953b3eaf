"""Who takes a dead engine's requests over: their client, which hands them over again.

While all tokenizers, all detokenizers or all replicas are down, nothing is sent, and what is to be
sent is *parked* in the ledger. What a death does to a request that was sent depends on what died
with it:

    died               exposed to it is                          gets a strike if exposed
    a replica          every request that was sent there         yes
    (or those that step together, as one)
    a detokenizer      every request that goes by it             yes
    a tokenizer        of those that go by it, one not known     if it was not accepted
                       to be in the scheduler: not accepted,
                       or not begun (handle.py)

An exposed request gets its next incarnation, with what its caller has of it, and is parked. (So
late words of the older one are known for what they are.) One that is aborting is closed instead.
What was parked by its tokenizer's death may be running all the same: it is *at large*, and exposed
to the death of its replica or detokenizer until it is sent again. One that isn't exposed needs its
tokenizer no more; its Abort goes by another.

A parked request goes again as soon as anything can be sent: to the replica that it was with, which
has the blocks of its prompt, by the same tokenizer and detokenizer, or else to others that live. So
while one of each lives, nobody waits for the restart of another, and a request with one doesn't
notice the death of another.

Some requests kill engines. They are found by their *strikes*: a death while a request was under
way is its first one if it had proven itself since it was sent, or if something else had died the
last time; else one more. At MAX_STRIKES it fails as poisonous and isn't sent again. Innocent ones
share its first strike, so they must not share its second. A strike is a strike whichever replica
died, or which tokenizer: two of them are all that one request can take down, be it one twice or two
of them. When something can be sent again,

1. who isn't suspect goes at once,
2. who is goes *on trial*: one at a time, in the ledger's order, the next when the one before has
   proven itself or has ended. Of several API servers one at a time has such a trial (trials.py).

A process that somebody killed from outside was hardly killed by a request. Such a death is a
*blow*, counted like a strike, and two of them weigh as much: who has a strike or two blows is
suspect.

So of all that are suspect and not proven, a killer is the only one out when it kills again.
What can still take an innocent one on trial with it is another killer that has no strike yet: new
requests don't wait for a trial, which would make everybody wait for the sake of two killers at
once.

A replica that is removed because fewer are wanted has first had time to end what it had. What is
left goes on elsewhere, and it is nobody's strike.

A request that ends here and not in the engine, or that goes on with another replica or by another
tokenizer, may still have a straggler where it was (a Generate that was under way). So an Abort
follows it on its own way, as soon as there is somebody to hear it: when a tokenizer is back, all
have heard what the one before had sent. (If the tokenizer dies with that, the straggler runs to its
own end, unheard. Of a replica that is removed there is nobody to tell.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from ..mq.errors import PoisonousRequestError
from ..mq.messages import Abort, ClientToTokenizer
from .handle import RequestHandle
from .routing import Router
from .text_routing import TextRouter
from .trials import Trials

MAX_STRIKES = 2
_BLOWS = 2  # to a strike
_NEEDED = frozenset({"tokenizer", "detokenizer", "scheduler", "worker"})


class Takeover:
    """What is down, what waits for it, and who is on trial.

    send: to the message's tokenizer, which lives; never called while nothing can be served. router,
    text: know who lives, and are told here. last_death: the text of the last death.
    on_trial: the one suspect that is out and has not proven itself.
    """

    def __init__(
        self,
        send: Callable[[ClientToTokenizer], None],
        router: Router,
        text: TextRouter,
        trials: Trials,
    ) -> None:
        self.last_death = ""
        self.on_trial: RequestHandle | None = None
        self.num_takeovers = 0
        self.num_poisoned = 0
        self._send = send
        self._router = router
        self._text = text
        self._trials = trials
        self._down: set[str] = set()  # names of what has died and isn't back
        self._waiting: deque[RequestHandle] = deque()  # for their trial
        # By request, replica and tokenizer, to be sent when it can be heard.
        self._late: dict[tuple[str, int, int], Abort] = {}
        self._removed: set[int] = set()  # replicas that don't come again

    @property
    def blocked(self) -> bool:
        """Whether no request can be served now."""
        return not (self._text.any_open and self._router.any_open)

    @property
    def missing(self) -> list[str]:
        """What is down, while no request can be served for it."""
        return sorted(self._down) if self.blocked else []

    def abort(self, handle: RequestHandle) -> None:
        """Tell the engine to end a request, now or when it can hear; not one it never got."""
        if not handle.sent:
            return
        tokenizers = self._text.tokenizers
        if handle.accepted and handle.begun and tokenizers.live:
            handle.go_by(tokenizers.kept(handle.request.tokenizer))
            self._track(handle)
        request = handle.request
        self._tell(
            Abort(request.request_id, request.incarnation, request.engine, request.tokenizer)
        )

    def lost(
        self,
        names: Sequence[str],
        error: str,
        from_outside: bool,
        ledger: Iterable[RequestHandle],
    ) -> list[RequestHandle]:
        """These have died. Returns the requests that have ended by it."""
        needed = [name for name in names if _kind(name) in _NEEDED]
        if not needed:
            return []
        self._down.update(needed)
        self.last_death = error
        self._waiting.clear()
        unit = _unit(needed[0])
        for engine in _engines(needed):
            self._router.lose(engine)
        self._text.lose(needed)
        for handle in ledger:
            if not _was_with(handle, needed):
                continue
            if not handle.parked or (handle.at_large and unit != "tokenizer"):
                self._hit(handle, unit, from_outside)
        if self.on_trial is not None and (self.on_trial.parked or not self.on_trial.open):
            self._end_trial()
        return [handle for handle in ledger if not handle.open]

    def removed(self, names: Sequence[str], ledger: Iterable[RequestHandle]) -> list[RequestHandle]:
        """These are a replica that is no more, by somebody's wish. As `lost`."""
        self._down.difference_update(names)
        engines = _engines(names)
        if not engines:
            return []
        (engine,) = engines  # those that step together aren't scaled
        self._router.lose(engine)
        self._removed.add(engine)
        self._late = {key: abort for key, abort in self._late.items() if key[1] != engine}
        self._waiting.clear()
        for handle in ledger:
            if handle.engine != engine or (handle.parked and not handle.at_large):
                continue
            if handle.aborting:
                handle.end_as_aborted()
            else:
                handle.park(at_large=False)
            self._track(handle)
        if self.on_trial is not None and (self.on_trial.parked or not self.on_trial.open):
            self._end_trial()
        return [handle for handle in ledger if not handle.open]

    def regained(self, names: Sequence[str]) -> None:
        """New incarnations of these are ready. `resume` comes next."""
        self._down.difference_update(names)
        self._text.regain(names)
        for engine in _engines(names):
            self._router.regain(engine)
            self._removed.discard(engine)
        late, self._late = self._late, {}
        for abort in late.values():
            self._tell(abort)

    def resume(self, ledger: Iterable[RequestHandle]) -> None:
        """Hand over what is parked, as far as something can be sent."""
        if self.blocked:
            return
        parked = [handle for handle in ledger if handle.parked]
        self._waiting = deque(handle for handle in parked if _weight(handle))
        for handle in parked:
            if not _weight(handle):
                self._hand_over(handle)
        if self.on_trial is None:
            self._try_next()

    def settle(self, handle: RequestHandle) -> None:
        """This request has proven itself or has ended."""
        if handle is self.on_trial:
            self._try_next()

    def stop(self) -> None:
        """Nothing comes back any more."""
        self._end_trial()
        self._trials.stop()
        self._waiting.clear()
        self._late.clear()

    def _hit(self, handle: RequestHandle, unit: str, from_outside: bool) -> None:
        just_tokenizer = unit == "tokenizer"
        exposed = not (just_tokenizer and handle.accepted and handle.begun)
        if handle.aborting:
            self.abort(handle)
            if exposed:
                handle.end_as_aborted()
        elif exposed:
            if not (just_tokenizer and handle.accepted):
                _strike(handle, unit, from_outside)
            if _weight(handle) < MAX_STRIKES:
                handle.park(at_large=just_tokenizer)
            else:
                self._give_up(handle)
        self._track(handle)

    def _give_up(self, handle: RequestHandle) -> None:
        self.num_poisoned += 1
        num_deaths = handle.strikes + handle.blows
        self.abort(handle)
        handle.fail(
            PoisonousRequestError(
                f"request {handle.request_id} was under way at {num_deaths} deaths of the "
                f"{handle.struck_with} in a row, and nothing came of it between them: it may be "
                f"their cause, and is not tried again. The last death: {self.last_death}"
            )
        )

    def _try_next(self) -> None:
        self._end_trial()
        while self._waiting and not self._waiting[0].open:
            self._waiting.popleft()
        # While all that live are leaving, who is on trial there may end, and no other one begins.
        if self._waiting and not self.blocked and self._trials.begin(self._try_again):
            self.on_trial = self._waiting.popleft()
            self._hand_over(self.on_trial)

    def _try_again(self) -> None:
        """Another server had a trial."""
        if self.on_trial is None and not self.blocked:
            self._try_next()

    def _end_trial(self) -> None:
        if self.on_trial is not None:
            self.on_trial = None
            self._trials.end()

    def _hand_over(self, handle: RequestHandle) -> None:
        before, was_sent, text = handle.request, handle.sent, self._text
        stays = was_sent and self._router.is_open(before.engine)
        engine = before.engine if stays else self._router.choose(before)
        if was_sent:
            tokenizer = text.tokenizers.kept(before.tokenizer)
            detokenizer = text.detokenizers.kept(before.detokenizer)
        else:
            tokenizer, detokenizer = text.tokenizers.choose(), text.detokenizers.choose()
        request = handle.hand_over(engine, tokenizer, detokenizer)
        if was_sent and (engine, tokenizer) != (before.engine, before.tokenizer):
            older = request.incarnation - 1
            self._tell(Abort(request.request_id, older, before.engine, before.tokenizer))
        self.num_takeovers += request.incarnation > 0
        self._track(handle)
        self._send(request)

    def _track(self, handle: RequestHandle) -> None:
        self._router.track(handle)
        self._text.track(handle)

    def _tell(self, abort: Abort) -> None:
        """It means all older incarnations, too."""
        if abort.engine in self._removed:
            return
        by_live = self._text.any_open and self._text.tokenizers.is_live(abort.tokenizer)
        if not (by_live and self._router.is_live(abort.engine)):
            self._late[abort.request_id, abort.engine, abort.tokenizer] = abort
        else:
            self._send(abort)


def _strike(handle: RequestHandle, unit: str, from_outside: bool) -> None:
    if handle.struck_with != unit or handle.proven:
        handle.strikes = handle.blows = 0
    handle.struck_with = unit
    if from_outside:
        handle.blows += 1
    else:
        handle.strikes += 1


def _weight(handle: RequestHandle) -> int:
    """In strikes."""
    return handle.strikes + handle.blows // _BLOWS


def _was_with(handle: RequestHandle, names: Collection[str]) -> bool:
    """Whether one of these, which have died as one, is of those that a request goes by."""
    request = handle.request
    needs = (
        f"scheduler.{request.engine}",
        f"tokenizer.{request.tokenizer}",
        f"detokenizer.{request.detokenizer}",
    )
    return any(name in names for name in needs)


def _unit(name: str) -> str:
    """What dies as one (topology.py): the workers and their scheduler are an engine."""
    kind = _kind(name)
    return "engine" if kind in ("scheduler", "worker") else kind


def _engines(names: Iterable[str]) -> list[int]:
    """Which replicas these are, if they are any: their schedulers' numbers."""
    return [int(name.partition(".")[2]) for name in names if _kind(name) == "scheduler"]


def _kind(name: str) -> str:
    return name.partition(".")[0]

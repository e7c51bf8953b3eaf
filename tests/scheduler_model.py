"""What planner.py's rules say, written down plainly: lists sorted anew, blocks as sets, no caches.

Without prefix caching. A block is a number that is never used again; how many are free is what all
holders together leave.
"""

from dataclasses import dataclass, field
from itertools import count


@dataclass(eq=False)
class Choice:
    """held: it waits to fork. source: a fork's block to be copied. length: tokens that are known;
    more may be computed. stop_ids end it, but not in its first min_tokens - 1 tokens of output.
    preempted: in the planning of which step.
    """

    request: str
    number: int
    place: tuple
    num_prompt: int
    limit: int
    stop_ids: frozenset
    min_tokens: int
    length: int
    computed: int = 0
    preempted: int = -1
    state: str = "waiting"
    blocks: list = field(default_factory=list)
    source: int | None = None

    @property
    def name(self):
        return self.request, self.number

    @property
    def priority(self):
        return self.place[0]

    @property
    def num_output(self):
        return self.length - self.num_prompt


class Model:
    """`plan` returns [(name, number of tokens)] in order, or None. The steps from `oldest` to
    `number` - 1 are in flight then.
    """

    def __init__(self, config, num_blocks):
        self.config = config
        self.num_blocks = num_blocks
        self.choices = {}
        self.preemptions = 0
        self._streams = count()
        self._block_numbers = count()

    def add(self, request, num_prompt, n, priority, max_tokens, stop_ids=frozenset(), min_tokens=0):
        limit = min(num_prompt + max_tokens, self.num_blocks * self.config.block_size + 1)
        for i in range(n):
            place = priority, next(self._streams)
            stops = stop_ids, min_tokens
            choice = Choice(request, i, place, num_prompt, limit, *stops, num_prompt)
            choice.state = "held" if i else "waiting"
            self.choices[choice.name] = choice

    def end(self, name):
        self.choices.pop(name, None)

    def abort(self, request):
        for name in [name for name in self.choices if name[0] == request]:
            self.end(name)

    def token(self, name, token=None):
        """Its step's output is back."""
        choice = self.choices.get(name)
        if choice is None:
            return
        choice.length += 1
        for sibling in self.all("held", choice.request):
            self._fork(choice, sibling)
        stops = token in choice.stop_ids and choice.num_output >= choice.min_tokens
        if stops or choice.length >= choice.limit:
            self.end(name)

    def all(self, state, request=None):
        found = [
            choice
            for choice in self.choices.values()
            if choice.state == state and request in (None, choice.request)
        ]
        return sorted(found, key=lambda choice: choice.place)

    @property
    def num_free(self):
        return self.num_blocks - len(_blocks(self.holders))

    @property
    def holders(self):
        both = [*self.all("running"), *self.all("forking")]
        return sorted(both, key=lambda choice: choice.place)

    def plan(self, number, oldest):
        self.number, self.oldest = number, oldest
        self.budget = self.config.max_num_batched_tokens
        self.planned, self.partial = [], []
        running = self.all("running")
        self.decodes = 1 << 40
        if self.config.pipeline_parallel_size > 1:
            self.decodes = -(-len(running) // self.config.pipeline_parallel_size)
        may_enter = True
        for priority in sorted({choice.priority for choice in running}):
            may_enter = may_enter and self._enter(before=priority)
            for choice in running:
                if choice.priority == priority and choice.state == "running":
                    self._go_on(choice)
        for fork in self.all("forking"):
            if self.budget and self._num_rows:
                fork.source, fork.state = None, "running"
                self._compute(fork, 1)
            else:
                self._give_up(fork)
        self._enter()
        return self.planned or None

    @property
    def _num_rows(self):
        return self.config.max_num_seqs - len(self.all("running"))

    def _fork(self, choice, sibling):
        if choice.state != "running" or not self.num_free:
            sibling.state = "waiting"
            return
        sibling.state = "forking"
        sibling.computed = choice.num_prompt - 1
        num_shared, place = divmod(sibling.computed, self.config.block_size)
        sibling.source = choice.blocks[num_shared] if place else None
        sibling.blocks = [*choice.blocks[:num_shared], next(self._block_numbers)]

    def _go_on(self, choice):
        most = self.config.long_prefill_token_threshold or self.budget
        num_tokens = min(max(1, choice.length - choice.computed), self.budget, most)
        if not num_tokens or choice.computed + 1 >= choice.limit:
            return
        left = choice.length - choice.computed
        if self.config.pipeline_parallel_size > 1 and left < 1:
            return
        if left <= 1 and not self.decodes:
            return
        while (missing := self._missing(choice, choice.computed + num_tokens)) > self.num_free:
            last = self.holders[-1]
            self._give_up(last)
            if last is choice:
                return
        choice.blocks += [next(self._block_numbers) for _ in range(missing)]
        self.decodes -= left <= 1
        self._compute(choice, num_tokens)

    def _compute(self, choice, num_tokens):
        choice.computed += num_tokens
        self.budget -= num_tokens
        self.planned.append((choice.name, num_tokens))
        if choice.computed < choice.length:
            self.partial.append(choice)

    def _missing(self, choice, num_tokens):
        return max(0, -(-num_tokens // self.config.block_size) - len(choice.blocks))

    def _enter(self, before=None):
        """False if the first of those that are wanted can't."""
        config = self.config
        threshold = config.long_prefill_token_threshold or 1 << 40
        while self.budget:
            num_long = sum(choice.length > threshold for choice in self.partial)
            waiting = self.all("waiting")
            if 0 < config.max_long_partial_prefills <= num_long:
                waiting = [choice for choice in waiting if choice.length <= threshold]
            if not waiting:
                break
            choice, most = waiting[0], min(self.budget, threshold)
            limit = config.max_num_partial_prefills or 1 << 40
            if before is not None and choice.priority >= before:
                break
            if choice.preempted > self.oldest:
                return False
            if choice.length > most and len(self.partial) >= limit:
                return False
            if not self._room(choice, preempt=before is not None):
                return False
            num_tokens = min(choice.length, most)
            missing = self._missing(choice, num_tokens)
            choice.blocks = [next(self._block_numbers) for _ in range(missing)]
            choice.state = "running"
            self._compute(choice, num_tokens)
        return True

    def _room(self, choice, preempt):
        needed = self._missing(choice, choice.length)
        if self._num_rows and needed <= self.num_free:
            return True
        stay = [other for other in self.holders if other.priority <= choice.priority]
        rows = self.config.max_num_seqs - sum(other.state == "running" for other in stay)
        if not preempt or not rows or needed > self.num_blocks - len(_blocks(stay)):
            return False
        while not self._num_rows or needed > self.num_free:
            last = self.holders[-1]
            assert last.priority > choice.priority, "it takes from its equals"
            self._give_up(last)
        return True

    def _give_up(self, choice):
        if choice.state == "running":
            self.preemptions += 1
            choice.preempted = self.number
        choice.state, choice.blocks, choice.source, choice.computed = "waiting", [], None, 0


def _blocks(choices):
    return {block for one in choices for block in (*one.blocks, one.source) if block is not None}

"""How replicas on devices that share experts agree on each step, on the host, before anybody
launches it (actors/scheduler/waves.py; on the devices replicas.py).

A step begins with a meeting through memory that the workers share: which step of which wave each is
in, whether its replica has work, and how its own step looks. From that all come to the same answer:

    nobody has tokens         nothing is launched
    all that have decode      a decode step of as many sequences as the largest needs, padded, and
                              for the longest context that one has
    somebody has a prompt     a step with prompts of as many tokens as the longest needs; who only
                              decodes, runs it, too

So all have as many rows, P, by which all sizes on the devices go that the others see. Who has no
tokens runs a step that is all padding. Padding costs no time that isn't lost already: the others
wait for the largest step anyway.

A meeting is one round of shared memory; meanwhile the devices run what was launched before. No
worker that waits in one keeps another from coming to it: that takes the output of a step that all
have launched. Of a replica with several ranks all meet, with the same to say. Where replicas are on
several hosts, each host has a copy of the memory, which mirrors keep alike (../mirror.py).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ...mq.messages import WaveStep
from ..lockstep import check_places, check_rows, compile_kernels
from ..mirror import Exchange
from ..parallel import HostGroup, map_parts
from .batch import Ints, Step
from .graphs import at_least
from .replicas import Ranks

NOTHING, DECODE, MIXED = range(3)  # what a replica has in a step; of several the most counts

_NO_WAVE = WaveStep(0, 0, False)
_MASK = (1 << 31) - 1  # what fits of a number that grows for months
_NONE = np.empty(0, np.int32)
_NOBODY = Step(*[_NONE] * 7, False, 0, 0, 0, 0)


class Agreed(NamedTuple):
    """rows: P. longest: of a decode step's contexts. num_tokens: of each replica's rows so many are
    its own, int32 [N].
    """

    kind: int
    rows: int
    longest: int
    num_tokens: Ints


def words_of(step: Step | None) -> tuple[int, int, int, int]:
    """What a replica says of its own step: the kind, its tokens, these padded as it would, and the
    longest context of sequences of one token.
    """
    if step is None:
        return NOTHING, 0, 0, 0
    kind = DECODE if step.is_decode else MIXED
    return kind, int(step.ends[-1]), step.tokens, step.longest


def agree(words: Ints, counts: list[int]) -> Agreed | None:
    """words: of all replicas (words_of), int32 [N, 4]. counts: of the graphs of steps with prompts.
    None: nobody has tokens.
    """
    kind, most, padded, longest = words.max(0).tolist()
    if kind == NOTHING:
        return None
    rows = padded
    if kind == MIXED and counts and most <= counts[-1]:
        rows = at_least(counts, most)
    return Agreed(kind, rows, longest, words[:, 1].copy())


def fit(step: Step | None, agreed: Agreed, pad_decodes: Callable[[int], int]) -> Step:
    """A replica's own step, as all run it. pad_decodes: from sequences of one token."""
    step = (step or _NOBODY)._replace(tokens=agreed.rows, num_tokens=agreed.num_tokens)
    if agreed.kind == DECODE:
        return step._replace(is_decode=True, decodes=agreed.rows, longest=agreed.longest)
    # Tokens behind its own are padding, and laid out as if they were one sequence's.
    step = step._replace(longest_chunk=agreed.rows)
    if not step.is_decode:
        return step
    return step._replace(is_decode=False, decodes=pad_decodes(max(len(step.rows), 2)))


class Lockstep:
    """One rank's. counts: of the graphs of steps with prompts, once they are made. host: all ranks
    of all replicas.
    """

    def __init__(
        self,
        ranks: Ranks,
        memory_fd: int,
        pad_decodes: Callable[[int], int],
        timeout: float,
        num_links: int = 0,
    ) -> None:
        """memory_fd: an empty file that all ranks of this host share. timeout: seconds to wait for
        the others. num_links: mirrors of that memory here. Raises as HostGroup and map_parts where
        not all come.
        """
        self.ranks, self.timeout = ranks, timeout
        self.counts: list[int] = []
        self._pad_decodes, self._meetings = pad_decodes, 0
        compile_kernels()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a meeting is too short for more
        try:
            everyone = Exchange(tuple(range(ranks.workers)))
            (memory,) = map_parts(memory_fd, [everyone], num_links)
            self.host = HostGroup(ranks.worker, ranks.workers, memory, timeout)
        finally:
            torch.set_num_threads(threads)
        said, heard = np.zeros(8, np.int32), np.zeros((ranks.workers, 8), np.int32)
        self._said, self._heard = said, heard[:: ranks.ranks]  # a replica's ranks say the same
        (self._exchange,) = self.host.all_side_by_side(
            np.ones(1, np.int64), _words(said[None]), _words(heard.reshape(1, -1))
        )
        self._file = -1

    def share_file(self, owner: int) -> int:
        """Another empty file, until `leave`, that all have who name the same owner: a worker of
        their host.
        """
        assert self._file < 0
        self._file = self.host.share_file(owner)
        return self._file

    def check_rows(self, dtype: torch.dtype, hidden: int) -> None:
        """Raises ConfigError where replicas have rows of other types or sizes."""
        said = np.array([dtype.itemsize, hidden], np.int32)
        check_rows(self.host.all_gather(said)[:: self.ranks.ranks])

    def check_alike(self, what: str, things: object) -> None:
        """Raises AssertionError where ranks have different ones, by what these look like."""
        digest = np.array([zlib.crc32(repr(things).encode()) & _MASK], np.int32)
        digests = self.host.all_gather(digest).ravel()
        assert (digests == digests[0]).all(), f"replicas differ in {what}: here {things!r}"

    def meet(self, place: WaveStep | None, step: Step | None) -> tuple[Step | None, bool]:
        """The step as all run it, and whether any replica had work. Once in each step.

        Raises as HostGroup.check where not all come, and AssertionError where they come to
        different steps.
        """
        place = place or _NO_WAVE
        numbers = (number & _MASK for number in (self._meetings, place.wave, place.step))
        self._said[:] = (*numbers, place.has_work, *words_of(step))
        self._exchange()
        self.host.check()
        check_places(self._heard[:, :3])
        self._meetings += 1
        any_work = bool(self._heard[:, 3].any())
        agreed = agree(self._heard[:, 4:], self.counts)
        return None if agreed is None else fit(step, agreed, self._pad_decodes), any_work

    def leave(self) -> None:
        self.host.leave()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _words(values: Ints) -> torch.Tensor:
    """As an exchange takes them, which asks nothing of what is in them."""
    return torch.from_numpy(values.view(np.float32))

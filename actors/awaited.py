"""The actors of this host that wait for others (hosts.py), as their lifecycle knows them.

scheduler.r   a replica elsewhere: ready once its node has attached
mirror.r      where replicas step together: ready once all hosts are there
gateway.k     where hosts share an engine, on the master: ready once node k is there; on a node:
              once the master is, which may still wait for other nodes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .restarts import Death, Unit


class Awaited:
    """remote: their names. patient: whether they may wait for any time at the first start, too."""

    def __init__(self, remote: Iterable[str], patient: bool) -> None:
        self._names = frozenset(remote)
        self.patient = patient

    def has(self, actor: str) -> bool:
        return actor in self._names

    def any_in(self, unit: Unit) -> bool:
        return not self._names.isdisjoint(unit.actors)

    def are_lost_by(self, death: Death) -> bool:
        """Whether its reason is on another host. A link of an engine's that broke may have done so
        by what is computed on both."""
        gateway = death.actor.startswith("gateway.")
        return death.actor in self._names and (death.from_outside or not gateway)

    def ends_with(self, unit: Unit, actor: str) -> bool:
        """Whether all hosts that the rest of this unit waits for are there, now that `actor` is
        ready."""
        first = {name for name in unit.actors if self.has(name) and not _is_scheduler(name)}
        only_met_master = self.patient and actor.startswith("gateway.")
        return actor in first and first <= unit.ready and not only_met_master

    def who_never_came(self, late: list[str], unit_of: Mapping[str, Unit]) -> str:
        """For people, of who is late; "" if nobody has to come."""

        def has_met_nobody(name: str) -> bool:
            if _is_scheduler(name):
                return not unit_of[name].ready & self._names
            return name.startswith("gateway.")

        if never := [name for name in late if self.has(name) and has_met_nobody(name)]:
            numbers = ", ".join(name.partition(".")[2] for name in never)
            what = "with rank" if _is_scheduler(never[0]) else "as node"
            return f"; no headless host has joined {what} {numbers}"
        return ""


def _is_scheduler(actor: str) -> bool:
    return actor.startswith("scheduler.")

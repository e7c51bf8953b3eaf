"""What a profiler's trace says: how long the device was idle, between steps and within them, and
which kernels took its time.

A trace is torch's (Chrome's trace events): complete events (ph "X") with a beginning and a duration
in microseconds. Of interest are

    user_annotation            a step's launch on the host, named by `annotation`
    kernel, gpu_mem...         work of the device, with the number (correlation) of its launch
    cuda_runtime, cuda_driver  launches on the host, with the same number
    cpu_op                     torch's operators, one within the other

Work of the device belongs to the step in whose annotation it was launched; a step is on the device
from its first work's beginning to its last one's end. Where there is no device, the annotations
themselves are the steps, and operators, less those within them, are the kernels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Event = dict[str, Any]
Interval = tuple[float, float]

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
_STEP = "ringcast step "
_ROWS = 20
_NAME = 72  # characters


def annotation(step: int) -> str:
    return f"{_STEP}{step}"


class Kernel(NamedTuple):
    name: str
    calls: int
    seconds: float


class Summary(NamedTuple):
    """Of the time from the first step's beginning to the last one's end: seconds. idle_between: the
    share in which no step was on the device; idle_within: in which one was, and nothing ran. On a
    processor nothing is known of what runs within a step, and idle_within is None.

    kernels: all of the trace, those that took most first.
    """

    device: bool
    steps: int
    seconds: float
    idle_between: float
    idle_within: float | None
    kernels: list[Kernel]

    def table(self) -> str:
        idle = f"idle: {self.idle_between:.1%} of it between steps"
        if self.idle_within is not None:
            idle += f", {self.idle_within:.1%} within steps"
        total = sum(kernel.seconds for kernel in self.kernels) or 1.0
        rows = [
            f"{kernel.name[:_NAME]:<{_NAME}} {kernel.calls:>8} {kernel.seconds * 1e3:>10.3f} "
            f"{kernel.seconds / total:>7.1%}"
            for kernel in self.kernels[:_ROWS]
        ]
        what = "kernel" if self.device else "operator"
        head = f"{what:<{_NAME}} {'calls':>8} {'ms':>10} {'share':>7}"
        return "\n".join([f"{self.steps} steps in {self.seconds:.3f} s; {idle}", head, *rows])


def summarise(events: Iterable[Event]) -> Summary:
    """Events of a trace, in any order."""
    complete = [event for event in events if event.get("ph") == "X"]
    host = sorted(
        _interval(event)
        for event in complete
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(_STEP)
    )
    work = [event for event in complete if event.get("cat") in DEVICE]
    if not work:
        ops = [event for event in complete if event.get("cat") == "cpu_op"]
        return _summary(False, host, [], _add_up(_own_time(ops)))
    steps = _on_device(host, work, complete)
    kernels = _add_up((str(event["name"]), float(event["dur"])) for event in work)
    return _summary(True, steps, [_interval(event) for event in work], kernels)


def _summary(
    device: bool, steps: list[Interval], work: list[Interval], kernels: list[Kernel]
) -> Summary:
    if not steps:
        return Summary(device, 0, 0.0, 0.0, 0.0 if device else None, kernels)
    first, last = min(steps)[0], max(end for _, end in steps)
    span = max(last - first, 1e-9)
    occupied = list(_union(steps))
    between = span - _length(occupied)
    within = None
    if device:
        busy = _length(_common(list(_union(work)), occupied))
        within = (_length(occupied) - busy) / span
    return Summary(device, len(steps), span / 1e6, between / span, within, kernels)


def _on_device(host: list[Interval], work: list[Event], events: list[Event]) -> list[Interval]:
    """When each step of the host's was on the device. Steps without work there are left out."""
    begins = [begin for begin, _ in host]
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    steps: dict[int, Interval] = {}
    for event in work:
        at = launched.get(event.get("args", {}).get("correlation"))
        place = -1 if at is None else bisect_right(begins, at) - 1
        if place >= 0 and at is not None and at <= host[place][1]:
            begin, end = _interval(event)
            so_far = steps.get(place, (begin, end))
            steps[place] = (min(begin, so_far[0]), max(end, so_far[1]))
    return list(steps.values())


def _own_time(ops: list[Event]) -> Iterator[tuple[str, float]]:
    """Each operator's time, less that of the operators that it calls itself."""
    by_thread: dict[Any, list[Event]] = {}
    for event in ops:
        by_thread.setdefault(event.get("tid"), []).append(event)
    for thread in by_thread.values():
        open_ops: list[list[Any]] = []  # (end, name, own time)
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            begin, end = _interval(event)
            while open_ops and open_ops[-1][0] <= begin:
                _, name, own = open_ops.pop()
                yield name, own
            if open_ops:
                open_ops[-1][2] -= end - begin
            open_ops.append([end, str(event["name"]), end - begin])
        yield from ((name, own) for _, name, own in open_ops)


def _add_up(parts: Iterable[tuple[str, float]]) -> list[Kernel]:
    calls: dict[str, int] = {}
    times: dict[str, float] = {}
    for name, microseconds in parts:
        calls[name] = calls.get(name, 0) + 1
        times[name] = times.get(name, 0.0) + microseconds
    kernels = [Kernel(name, calls[name], times[name] / 1e6) for name in calls]
    return sorted(kernels, key=lambda kernel: (-kernel.seconds, kernel.name))


def _interval(event: Event) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """The same time without overlaps, in order."""
    current: Interval | None = None
    for begin, end in sorted(intervals):
        if current is None or begin > current[1]:
            if current is not None:
                yield current
            current = (begin, end)
        else:
            current = (current[0], max(current[1], end))
    if current is not None:
        yield current


def _common(left: list[Interval], right: list[Interval]) -> Iterator[Interval]:
    """Of intervals without overlaps, in order: the time that is in both."""
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            yield begin, end
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)

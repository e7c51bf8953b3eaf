"""The terminal chat, against a fake engine and over HTTP."""

from __future__ import annotations

import io
import signal
import threading
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ringcast.frontend.cli import chat
from ringcast.frontend.cli.conversation import Conversation
from ringcast.frontend.cli.main import main
from ringcast.mq.errors import InvalidRequestError
from ringcast.mq.messages import ErrorInfo

TEXT = "Hello, wörld 🌍!"


def messages_of(sent: Any) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in msgspec.json.decode(sent.prompt.messages)]


def give_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_piped_lines_are_answered_with_history(
    connection: Any, engine: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_lines(monkeypatch, "one", "", "two", "/reset", "three")
    assert main(["chat", "--system", "be kind", "--temperature", "0.5"]) == 0
    assert capsys.readouterr().out == f"{TEXT}\n{TEXT}\nforgotten\n{TEXT}\n"
    one, two, three = engine.generated
    system = ("system", "be kind")
    assert messages_of(one) == [system, ("user", "one")]
    assert messages_of(two) == [system, ("user", "one"), ("assistant", TEXT), ("user", "two")]
    assert messages_of(three) == [system, ("user", "three")]
    assert (one.params.temperature, one.params.max_tokens) == (0.5, None)


def test_a_server_by_url(
    url: str, engine: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_lines(monkeypatch, "one", "/temperature 0", "two")
    assert main(["chat", "--url", url + "/v1/", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "Hello,\ntemperature: 0.0\nHello,\n"
    one, two = engine.generated
    assert one.params.max_tokens == 2
    assert two.params.temperature == 0
    assert len(messages_of(two)) == 3
    assert one.output.model == "fake-model"


def test_a_servers_refusal_ends_a_piped_chat(
    url: str, engine: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_lines(monkeypatch, "one")
    assert main(["chat", "other-model", "--url", url]) == 2
    assert "this server has fake-model" in capsys.readouterr().err
    give_lines(monkeypatch, "one")
    engine.fail = ErrorInfo("the worker stumbled", 500)
    assert main(["chat", "--url", url]) == 1
    assert "the worker stumbled" in capsys.readouterr().err


def test_no_server(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    give_lines(monkeypatch, "one")
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    assert "no server answers there" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--dtype", "float32"], ["--config", "/nowhere.yaml"]])
def test_engine_options_and_a_url_exclude_each_other(
    url: str, capsys: Any, option: list[str]
) -> None:
    assert main(["chat", "--url", url, *option]) == 2
    assert option[1 if "yaml" in option[1] else 0] in capsys.readouterr().err


class Talk:
    """A terminal without a terminal: lines in, what was printed out."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = iter(lines)
        self.console = Console(file=io.StringIO(), width=80)

    def read(self) -> str:
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    @property
    def printed(self) -> str:
        return self.console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


class Parrot:
    """Says back the last message, word by word."""

    name = "parrot"
    num_tokens = 3

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.asked: list[list[dict[str, str]]] = []

    def answer(self, messages: Any, sampling: Any) -> chat.Pieces:
        self.asked.append(messages)
        yield from messages[-1]["content"].split(" ")
        if self.error is not None:
            raise self.error


def test_a_terminal_shows_speed_and_survives_ctrl_c_at_the_prompt() -> None:
    talk, parrot = Talk("a b", KeyboardInterrupt, "/quit", "never read"), Parrot()
    chat.talk(Conversation(None, {}), parrot, talk.console, talk.read, True)
    answer, speed, nothing, hint, bye, end = talk.printed.split("\n")
    assert end == ""
    assert (answer, nothing, bye) == ("ab", "", "bye")
    assert "3 tokens" in speed
    assert "Ctrl-D" in hint


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said() -> None:
    talk, parrot = Talk("a b", "c"), Parrot(KeyboardInterrupt())
    conversation = Conversation(None, {})
    chat.talk(conversation, parrot, talk.console, talk.read, True)
    assert "(stopped)" in talk.printed
    assert parrot.asked[1][:2] == [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "ab"},
    ]


def test_a_refused_message_is_not_kept() -> None:
    talk, parrot = Talk("a", "b"), Parrot(InvalidRequestError("the [context] is full"))
    chat.talk(Conversation(None, {}), parrot, talk.console, talk.read, True)
    assert "InvalidRequestError: the [context] is full" in talk.printed
    assert parrot.asked == [[{"role": "user", "content": text}] for text in "ab"]


def test_ctrl_c_aborts_the_request(
    connection: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.hold = 0

    def interrupting(to: str, message: Any) -> None:
        engine.send(to, message)
        if not engine.aborted:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    connection.send = interrupting
    give_lines(monkeypatch, "one")
    assert main(["chat"]) == 0
    assert engine.aborted == [engine.generated[0].request_id]


def test_commands() -> None:
    conversation = Conversation("be kind", {"top_k": 3})
    conversation.heard("question", "answer")
    assert conversation.is_command("/help")
    assert not conversation.is_command("what is /help?")
    assert "/temperature" in conversation.command("/help")
    assert conversation.command("/temperature 0.3") == "temperature: 0.3"
    assert conversation.command("/temperature") == "temperature: 0.3"
    for wrong in ("-1", "warm", "nan"):
        assert "at least 0" in conversation.command(f"/temperature {wrong}")
    assert conversation.sampling == {"top_k": 3, "temperature": 0.3}
    assert conversation.command("/nothing x") == "no command /nothing; /help lists them"
    assert len(conversation.asking("next")) == 4
    assert conversation.command("/system be  brief ") == "system message: be  brief"
    assert conversation.asking("next")[0] == {"role": "system", "content": "be  brief"}
    assert len(conversation.asking("next")) == 2
    assert conversation.command("/system") == "system message: (none)"
    assert len(conversation.asking("next")) == 1
    conversation.command("/quit")
    assert conversation.ended

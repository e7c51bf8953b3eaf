"""A chat's state: what has been said, and what the commands that begin with a slash change."""

from __future__ import annotations

from typing import Any

from ...mq.errors import InvalidRequestError
from ...mq.sampling_params import SamplingParams

Message = dict[str, str]

_HELP = """\
/reset             forget what has been said
/system TEXT       set the system message (without TEXT: take it away) and forget what has been said
/temperature X     0 is greedy; without X: show it
/quit              end (as Ctrl-D does)"""


class Conversation:
    """sampling: fields of SamplingParams that the user has set. ended: after /quit."""

    def __init__(self, system: str | None, sampling: dict[str, Any]) -> None:
        self.sampling = dict(sampling)
        self.ended = False
        self._system = system
        self._said: list[Message] = []

    def asking(self, text: str) -> list[Message]:
        """The messages that ask for an answer to `text`."""
        first = [_message("system", self._system)] if self._system else []
        return [*first, *self._said, _message("user", text)]

    def heard(self, text: str, answer: str) -> None:
        """Keep a question with its answer, whole or stopped."""
        self._said += [_message("user", text), _message("assistant", answer)]

    @staticmethod
    def is_command(line: str) -> bool:
        return line.startswith("/")

    def command(self, line: str) -> str:
        """Do what a command says; what to tell the user."""
        name, _, rest = line.strip().partition(" ")
        match name:
            case "/help":
                return _HELP
            case "/reset":
                self._said.clear()
                return "forgotten"
            case "/system":
                self._system = rest.strip() or None
                self._said.clear()
                return f"system message: {self._system or '(none)'}"
            case "/temperature":
                return self._set_temperature(rest.strip())
            case "/quit" | "/exit":
                self.ended = True
                return "bye"
            case _:
                return f"no command {name}; /help lists them"

    def _set_temperature(self, text: str) -> str:
        if text:
            try:
                value = float(text)
                SamplingParams(temperature=value)
            except (InvalidRequestError, ValueError):
                return f"temperature must be a number of at least 0, got {text!r}"
            self.sampling["temperature"] = value
        return f"temperature: {self.sampling.get('temperature', '(the default)')}"


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}

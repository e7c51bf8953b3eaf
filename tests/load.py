"""Requests of a served model that are under way at once."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Sequence
from typing import Any

from serving import until


class Load:
    """Completions of all prompts, asked for at once. seconds: that one of them may take.

    Answers come as streams, if `body` says so.
    """

    def __init__(
        self, url: str, prompts: Sequence[str | list[int]], seconds: float = 60.0, **body: Any
    ) -> None:
        self._url, self._seconds, self._body = url + "/v1/completions", seconds, body
        self._choices: list[list[dict[str, Any]]] = [[] for _ in prompts]
        self._errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(prompt, choices))
            for prompt, choices in zip(prompts, self._choices, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, prompt: str | list[int], choices: list[dict[str, Any]]) -> None:
        body = {"model": "model", "prompt": prompt, **self._body}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as answer:
                if not self._body.get("stream"):
                    choices += json.load(answer)["choices"]
                    return
                for line in answer:
                    if line.startswith(b"data: {"):
                        choices += json.loads(line[6:])["choices"]
        except (OSError, ValueError, KeyError) as error:
            self._errors.append(error)

    def begun(self) -> Load:
        """Itself, when all streams have said something and one hasn't ended."""
        until(lambda: self._errors or all(self._choices), self._seconds)
        assert any(thread.is_alive() for thread in self._threads), self._errors
        return self

    def texts(self) -> list[str]:
        return ["".join(choice["text"] for choice in choices) for choices in self._ended()]

    def tokens(self) -> list[list[int]]:
        """Of requests with logprobs and return_tokens_as_token_ids."""
        rows = [[choice["logprobs"] for choice in choices] for choices in self._ended()]
        names = [[name for each in row if each for name in each["tokens"]] for row in rows]
        return [[int(name.removeprefix("token_id:")) for name in row] for row in names]

    def _ended(self) -> list[list[dict[str, Any]]]:
        for thread in self._threads:
            thread.join(self._seconds)
        assert not self._errors, self._errors
        assert all(self._choices)
        return self._choices

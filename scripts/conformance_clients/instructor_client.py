"""instructor: the modes that need no guided decoding work, the others get a clear 400."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import instructor
import openai
from cases import KEY, MODEL, case, refusal, run, url
from pydantic import BaseModel

ANSWER = '```json\n{"name": "Rome", "rivers": ["Tiber"]}\n```'
CALL = '<tool_call>\n{"name": "City", "arguments": {"name": "%s", "rivers": []}}\n</tool_call>'
REFUSED = {
    instructor.Mode.TOOLS: "tool_choice",
    instructor.Mode.JSON: "response_format",
    instructor.Mode.JSON_SCHEMA: "response_format",
}


class City(BaseModel):
    name: str
    rivers: list[str]


def connect(mode: Any, kind: Any = openai.OpenAI) -> Any:
    api = kind(base_url=url("echo"), api_key=KEY, max_retries=0, timeout=60)
    return instructor.from_openai(api, mode=mode)


def fields(text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say [[{text}]]"}]
    return {"model": MODEL, "messages": messages, "max_retries": 1}


@case("MD_JSON")
def markdown() -> None:
    api = connect(instructor.Mode.MD_JSON)
    city = api.chat.completions.create(response_model=City, **fields(ANSWER))
    assert city.model_dump() == {"name": "Rome", "rivers": ["Tiber"]}


@case("MD_JSON, async")
async def asynchronous() -> None:
    api = connect(instructor.Mode.MD_JSON, openai.AsyncOpenAI)
    city = await api.chat.completions.create(response_model=City, **fields(ANSWER))
    assert city.rivers == ["Tiber"]


@case("MD_JSON, partial")
def partial() -> None:
    api = connect(instructor.Mode.MD_JSON)
    *_, last = api.chat.completions.create_partial(response_model=City, **fields(ANSWER))
    assert last.name == "Rome"


@case("PARALLEL_TOOLS")
def parallel() -> None:
    api = connect(instructor.Mode.PARALLEL_TOOLS)
    text = CALL % "Rome" + CALL % "Oslo"
    cities = api.chat.completions.create(response_model=Iterable[City], **fields(text))
    assert [city.name for city in cities] == ["Rome", "Oslo"]


@refusal("TOOLS, JSON, JSON_SCHEMA")
def guided() -> None:
    for mode, param in REFUSED.items():
        try:
            connect(mode).chat.completions.create(response_model=City, **fields("{}"))
        except Exception as error:
            text = f"{error} {error.__cause__}"
            assert param in text and "guided decoding" in text, text
        else:
            raise AssertionError(f"{mode} was accepted")


if __name__ == "__main__":
    run()

"""langchain-openai: chats, completions, embeddings, tools, and structured output's refusals."""

from __future__ import annotations

from typing import Any

import openai
from cases import EMBEDDING_MODEL, KEY, MODEL, case, refusal, run, url
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

QUESTION = "What is the capital of France?"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class City(BaseModel):
    name: str


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def chat(server: str, **options: Any) -> ChatOpenAI:
    options = {"max_tokens": 32, **options}
    return ChatOpenAI(
        base_url=url(server), api_key=KEY, model=MODEL, temperature=0, max_retries=0, **options
    )


@case("invoke, stream, batch")
def invoke() -> None:
    model = chat("real")
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 3
    streamed = list(model.stream(QUESTION))
    assert "".join(chunk.content for chunk in streamed) == answer.content
    both = model.batch([QUESTION, QUESTION])
    assert [one.content for one in both] == [answer.content] * 2


@case("ainvoke, astream")
async def asynchronous() -> None:
    model = chat("real", stream_usage=True)
    answer = await model.ainvoke(QUESTION)
    total = None
    async for chunk in model.astream(QUESTION):
        total = chunk if total is None else total + chunk
    assert total is not None and total.content == answer.content
    assert total.usage_metadata == answer.usage_metadata


@case("log-probabilities")
def logprobs() -> None:
    answer = chat("real", logprobs=True, top_logprobs=2, max_tokens=4).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"]) == 4


@case("the Responses API")
def responses() -> None:
    model = chat("real", use_responses_api=True)
    assert "Paris" in model.invoke(QUESTION).text
    assert "Paris" in "".join(chunk.text for chunk in model.stream(QUESTION))


@case("completions")
def completions() -> None:
    model = OpenAI(base_url=url("real"), api_key=KEY, model=MODEL, temperature=0, max_tokens=8)
    text = model.invoke("1, 2, 3, 4,")
    assert text.startswith(" 5, 6")
    assert "".join(model.stream("1, 2, 3, 4,")) == text


@case("tools")
def tools() -> None:
    model = chat("echo", max_tokens=None).bind_tools([weather])
    first = HumanMessage(f"Say [[{CALL}]]")
    answer = model.invoke([first])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    total = None
    for chunk in model.stream([first]):
        total = chunk if total is None else total + chunk
    assert total is not None and total.tool_calls[0]["args"] == {"city": "Rome"}
    said = weather.invoke(call)
    assert isinstance(said, ToolMessage) and isinstance(answer, AIMessage)
    again = model.invoke([HumanMessage("Say [[It rains.]]"), answer, said])
    assert again.content == "It rains."


@case("embeddings")
def embeddings() -> None:
    model = OpenAIEmbeddings(
        base_url=url("embedding"),
        api_key=KEY,
        model=EMBEDDING_MODEL,
        check_embedding_ctx_length=False,
    )
    vectors = model.embed_documents(["one", "two"])
    assert [len(vector) for vector in vectors] == [384, 384]
    pairs = zip(model.embed_query("one"), vectors[0], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-5


@refusal("with_structured_output")
def structured() -> None:
    params = {
        "json_schema": "response_format",
        "json_mode": "response_format",
        "function_calling": "tool_choice",
    }
    for method, param in params.items():
        model = chat("echo").with_structured_output(City, method=method)
        try:
            model.invoke("Give JSON. Say [[{}]]")
        except openai.BadRequestError as error:
            assert error.param == param, error.param
            assert "guided decoding" in error.message
        else:
            raise AssertionError(f"{method} was accepted")


if __name__ == "__main__":
    run()

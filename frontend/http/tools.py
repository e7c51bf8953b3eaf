"""The tools of a chat request: what clients may offer, and which choice of them there is.

    tools   tool_choice       the prompt has the tools   the output is searched for calls
    none    absent            no                         no
    some    absent or "auto"  yes                        yes; needs --enable-auto-tool-choice
    some    "none"            yes                        no

Whatever else tool_choice may be needs decoding to be guided, and is refused.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from ...mq.errors import InvalidRequestError
from ...mq.server_config import ServerConfig

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_NEEDS_GUIDANCE = (
    "it needs guided decoding, which this server doesn't have yet; tool_choice can be "
    '"auto" or "none"'
)


def check_tools(tools: list[Any]) -> None:
    """Raises InvalidRequestError that names the place of what is no function tool."""
    for i, tool in enumerate(tools):
        _check_tool(f"tools[{i}]", tool)


def check_tool_choice(tools: list[Any], choice: Any) -> None:
    """Raises InvalidRequestError for a choice that can't be made of these tools."""
    if choice in (None, "none", "auto"):
        return
    if choice == "required":
        raise InvalidRequestError(
            f'tool_choice "required" is not supported yet: {_NEEDS_GUIDANCE}', "tool_choice"
        )
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        _refuse(
            "tool_choice",
            '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            choice,
        )
    if name not in [tool["function"]["name"] for tool in tools]:
        raise InvalidRequestError(
            f"tool_choice names the function {name[:80]!r}, which is not in tools", "tool_choice"
        )
    raise InvalidRequestError(
        f"tool_choice with a function's name is not supported yet: {_NEEDS_GUIDANCE}",
        "tool_choice",
    )


def tool_parser(tools: list[Any], choice: Any, server: ServerConfig) -> str:
    """The name of the parser that looks for calls; empty where none does.

    Raises InvalidRequestError where one would have to and there is none.
    """
    if not tools or choice == "none":
        return ""
    if not server.enable_auto_tool_choice or server.tool_call_parser is None:
        raise InvalidRequestError(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be '
            "set",
            "tool_choice",
        )
    return server.tool_call_parser


def _check_tool(place: str, tool: Any) -> None:
    if not isinstance(tool, dict):
        _refuse(place, 'an object {"type": "function", "function": {...}}', tool)
    if tool.get("type") != "function":
        _refuse(f"{place}.type", '"function"', tool.get("type"))
    function = tool.get("function")
    place += ".function"
    if not isinstance(function, dict):
        _refuse(place, "an object with a name", function)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(f"{place}.name", "1 to 128 letters, digits or any of _.-", name)
    if not isinstance(function.get("description"), str | None):
        _refuse(f"{place}.description", "a string", function["description"])
    if not isinstance(function.get("strict"), bool | None):
        _refuse(f"{place}.strict", "true or false", function["strict"])
    if function.get("parameters") is not None:
        _check_schema(f"{place}.parameters", function["parameters"])


def _check_schema(place: str, schema: Any) -> None:
    """Of a JSON schema, as much as templates and models count on: that it describes an object."""
    if not isinstance(schema, dict):
        _refuse(place, "a JSON schema of an object", schema)
    if schema.get("type", "object") != "object":
        _refuse(f"{place}.type", '"object"', schema["type"])
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        _refuse(f"{place}.properties", "an object of JSON schemas", properties)
    for name, inner in properties.items():
        if not isinstance(inner, dict | bool):
            _refuse(f"{place}.properties.{name}", "a JSON schema", inner)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        _refuse(f"{place}.required", "a list of names", required)


def _refuse(place: str, accepted: str, value: Any) -> NoReturn:
    raise InvalidRequestError(f"{place} must be {accepted}, got {repr(value)[:80]}", place)

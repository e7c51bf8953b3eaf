"""A check and a hook of our own for schemathesis, which loads them (SCHEMATHESIS_HOOKS)."""

from __future__ import annotations

from typing import Any

import schemathesis

PROFILES = ("/start_profile", "/stop_profile")  # refused for a reason that no field has
SCALES = {"/scale": "replicas", "/scale_elastic_ep": "new_data_parallel_size"}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """A scale that could be is to the one replica that there is: here is no room for 64."""
    field = SCALES.get(case.path)
    asked = case.body.get(field) if field and isinstance(case.body, dict) else None
    if type(asked) in (int, float) and 1 <= asked <= 64:
        case.body = case.body | {field: 1}


@schemathesis.check
def refusal_names_the_field(ctx: Any, response: Any, case: Any) -> None:
    """A 400 names a field, or says that the body as a whole can't be read."""
    if response.status_code != 400 or case.path in PROFILES:
        return
    try:
        error = response.json()["error"]
    except ValueError:
        return  # no request that the server could parse as HTTP
    named = error["param"] is not None and error["param"].split(".")[0].split("[")[0]
    if not named and "body" not in error["message"]:
        raise AssertionError(f"a 400 that names no field: {error}")

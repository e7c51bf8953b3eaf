"""The pooling API where the engine has no room. (The rest is tested with a model.)"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from ringcast.frontend.client import EngineClient
from ringcast.frontend.http.pooling import PoolingApi
from ringcast.mq.config import ModelSpec, PoolingSpec
from ringcast.mq.errors import InvalidRequestError, OverloadedError


async def test_a_full_engine_is_to_be_asked_later(spec: ModelSpec) -> None:
    spec = msgspec.structs.replace(
        spec, pooling=PoolingSpec(kind="mean", normalize=True, dimension=2)
    )
    client = EngineClient(spec, lambda to, message: None, max_num_queued_reqs=2)
    api = PoolingApi(client, spec, lambda name: "some-model")
    asked = asyncio.create_task(api.embeddings(b'{"input": "a"}', "r1"))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="room for 1 more requests, not 2"):
        await api.score(b'{"text_1": "a", "text_2": "b"}', "r2")
    with pytest.raises(InvalidRequestError, match="holds 2 requests at most"):
        await api.rerank(b'{"query": "a", "documents": ["b", "c"]}', "r3")
    more = asyncio.create_task(api.pooling(b'{"input": "a"}', "r4"))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="room for 0 more requests, not 1"):
        await api.embeddings(b'{"input": "a"}', "r5")
    for task in (asked, more):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

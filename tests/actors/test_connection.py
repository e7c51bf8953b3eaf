"""An engine whose process can't be started. All else of the connection is in test_topology.py."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from typing import Any

import pytest
from no_model import SPEC

from ringcast.actors.connection import EngineConnection
from ringcast.mq.config import EngineConfig
from ringcast.mq.errors import EngineDeadError


def test_nothing_is_left_of_a_process_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineDeadError, match="the engine's process can't be started"):
        asyncio.run(EngineConnection.launch(EngineConfig(), SPEC))
    assert sorted(os.listdir("/proc/self/fd")) == before

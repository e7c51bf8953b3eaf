"""The interface towards a host."""

from __future__ import annotations

import socket

import pytest

from ringcast.executor import interfaces
from ringcast.executor.interfaces import interface_towards
from ringcast.mq.errors import ConfigError


def test_loopback_leads_to_this_host():
    assert interface_towards("127.0.0.1") == interface_towards("localhost") == "lo"


def test_every_interface_with_an_address_is_known():
    found = dict(interfaces._addresses())
    assert str(found["lo"]) in ("127.0.0.1", "::1")
    assert {*found} <= {name for _, name in socket.if_nameindex()}


def test_no_such_host(monkeypatch):
    with pytest.raises(ConfigError, match="no way to 'no such host'"):
        interface_towards("no such host")
    monkeypatch.setattr(interfaces, "_addresses", lambda: iter(()))
    with pytest.raises(ConfigError, match=r"no interface has the address 127\.0\.0\.1"):
        interface_towards("127.0.0.1")

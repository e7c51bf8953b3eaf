"""Which network interface leads to another host: for libraries that want its name."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Iterator

from ..mq.errors import ConfigError

_ANY_PORT = 9  # nothing is sent there


class _Entry(ctypes.Structure):
    """struct ifaddrs: getifaddrs(3)."""


_Entry._fields_ = (
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("destination", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)
# Where in a sockaddr of a family the address is.
_PLACES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


def interface_towards(address: str) -> str:
    """The name of the interface whose address this host would have in a connection to `address`.

    Raises ConfigError if there is no such host, or no way to it.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, _ANY_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError as error:
        raise ConfigError(f"no way to {address!r}: {error.strerror}") from error
    for name, has in _addresses():
        if has == own:
            return name
    raise ConfigError(f"no interface has the address {own}, which leads to {address!r}")


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    try:
        entry = first
        while entry:
            here = entry.contents
            if here.address:
                family = ctypes.c_ushort.from_address(here.address).value
                if family in _PLACES:
                    start, size = _PLACES[family]
                    raw = ctypes.string_at(here.address + start, size)
                    yield here.name.decode(), ipaddress.ip_address(raw)
            entry = here.next
    finally:
        library.freeifaddrs(first)

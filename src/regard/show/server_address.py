"""The address on which the map listens.

    bind_door("127.0.0.1", 0)     a socket on a free port, for this machine only
    name_host("0.0.0.0")          the host to write into the URL

Next: server.py
"""

from __future__ import annotations

import ipaddress
import socket

from regard.errors import OptionError


def bind_door(host: str, port: int) -> socket.socket:
    """Return a socket on an address and port; raise OptionError if it cannot be had."""
    if not 0 <= port <= 65_535:
        raise OptionError(f"port={port}, expected 0 for a free one, up to 65535.")
    try:
        found = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        raise OptionError(
            f"host={host!r:.80} is no address of this machine. Write 127.0.0.1, or "
            "0.0.0.0 for all addresses."
        ) from error
    family, kind, proto, _, place = found[0]
    # asyncio sets TCP_NODELAY only if proto says that this is TCP
    door = socket.socket(family, kind, proto)
    try:
        door.bind(place)
    except OSError as error:
        door.close()
        reason = str(error.strerror).lower()
        raise OptionError(
            f"the map cannot listen on {host} port {port}: {reason}. Choose another "
            "port, or none for any free one."
        ) from error
    return door


def name_host(address: str) -> str:
    """Return the host of a URL; for all addresses, the name of this machine."""
    if ipaddress.ip_address(address).is_unspecified:
        return socket.gethostname()
    return f"[{address}]" if ":" in address else address


def is_local(address: str) -> bool:
    """Return whether only this machine reaches an address."""
    return ipaddress.ip_address(address).is_loopback


def is_numeric_host(name: str) -> bool:
    """Return whether a host is an address in numbers, and not a name."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True

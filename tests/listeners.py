"""The TCP sockets on which a process and its descendants listen, read from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from pathlib import Path

LISTEN = "0A"  # state in /proc/net/tcp


def descendants(pid: int) -> set[int]:
    """`pid` and all processes below it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def listeners(pid: int) -> set[tuple[str, int]]:
    """(address, port) on which `pid` and its descendants listen."""
    found = set()
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            own = set()
            for entry in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile, as the list's own descriptor is
                    own.add(os.readlink(entry))
            for family in ("tcp", "tcp6"):
                for line in Path(f"/proc/{process}/net/{family}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == LISTEN and f"socket:[{fields[9]}]" in own:
                        address, _, port = fields[1].partition(":")
                        found.add((_address(address), int(port, 16)))
    return found


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _address(text: str) -> str:
    words = [struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))

"""The TCP sockets on which a process and its descendants listen."""

from __future__ import annotations

import contextlib
import ipaddress

import psutil


def listeners(pid: int) -> set[tuple[str, int]]:
    """(address, port) on which `pid` and its descendants listen."""
    found: set[tuple[str, int]] = set()
    processes = []
    with contextlib.suppress(psutil.Error):  # it has just ended, as any of them may
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            sockets = process.net_connections("tcp")
            found |= {(one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback

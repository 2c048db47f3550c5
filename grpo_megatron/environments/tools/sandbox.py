"""The program that runs code of the tool `python`: limits itself, then executes the code. Standard library only.

    python -I sandbox.py LIMITS < code       LIMITS: {"cpu_s": 10, "memory": bytes, "file": bytes}

A seccomp filter (seccomp(2)) refuses sockets, new processes, signals, and reaching into other processes. It needs no
privilege, and code that calls C cannot evade it. Threads are allowed. x86-64, and AArch64, where it has not been run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import traceback

OPEN_FILES = 64
_PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2  # of prctl(2)
CLONE_THREAD = 0x10000
# linux/filter.h: load a word of the system call's data; jump if equal, greater or equal, any bit set; return
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # REFUSE + errno
OTHER_NUMBERS = 0x40000000  # of the x32 calls of x86-64

# machine -> (its number in linux/audit.h, clone, other calls that are refused)
CALLS = {
    # fork vfork; socket socketpair; kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo; ptrace process_vm_readv/writev
    "x86_64": (0xC000003E, 56, (57, 58, 41, 53, 62, 200, 234, 129, 297, 101, 310, 311)),
    "aarch64": (0xC00000B7, 220, (198, 199, 129, 130, 131, 138, 240, 117, 270, 271)),
}
CLONE3 = 435  # the C library uses clone instead, whose flags a filter can read
REFUSED_EVERYWHERE = (424, 425, 438)  # pidfd_send_signal io_uring_setup pidfd_getfd


def sandbox_command(limits: dict[str, int]) -> list[str]:
    """The command that runs the code on its stdin within `limits`: all that a caller knows of the sandbox."""
    return [sys.executable, "-I", "-u", __file__, json.dumps(limits)]


def main() -> None:
    """Run the code on stdin; the exit code is that of the code."""
    limits = json.loads(sys.argv[1])
    code = sys.stdin.buffer.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _limit(limits)
    _install_filter(_filter())
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    try:
        exec(compile(code, "main.py", "exec"), {"__name__": "__main__"})
    except Exception as error:  # noqa: BLE001 - the code's own; a traceback without this file
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        sys.exit(1)


def _limit(limits: dict[str, int]) -> None:
    bounds = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: limits["file"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (bound, bound))


def _filter() -> list[tuple[int, int, int, int]]:
    """Instructions (code, jump if true, jump if false, operand) of the filter. Raises OSError on another machine."""
    if platform.machine() not in CALLS:
        raise OSError(f"code cannot be isolated on {platform.machine()}; only on {', '.join(CALLS)}")
    architecture, clone, refused = CALLS[platform.machine()]
    refuse = (RETURN, 0, 0, REFUSE + errno.EPERM)
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), refuse]
    program += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, OTHER_NUMBERS), refuse]
    program += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, REFUSE + errno.ENOSYS)]
    for number in (*refused, *REFUSED_EVERYWHERE):
        program += [(EQUAL, 0, 1, number), refuse]
    program += [(EQUAL, 0, 3, clone), (LOAD, 0, 0, FIRST_ARGUMENT), (ANY_BIT, 1, 0, CLONE_THREAD), refuse]
    return [*program, (RETURN, 0, 0, ALLOW)]


def _install_filter(program: list[tuple[int, int, int, int]]) -> None:
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(instructions)
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))  # struct sock_fprog
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
    if prctl(PR_SET_NO_NEW_PRIVS, 1, None, 0, 0) or prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel does not install a seccomp filter, so no code is run")


if __name__ == "__main__":
    main()

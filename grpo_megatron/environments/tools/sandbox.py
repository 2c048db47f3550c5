"""The program that runs code of the tool `python`: gives up what it can, then executes the code. Standard library only.

`python -I sandbox.py SETTINGS < code`. In this order, each for good: limits (setrlimit(2)); another user, if it was
started as root; with `readable`, no files but these and the working folder (Landlock, landlock(7)); a seccomp filter
(seccomp(2)), which allows the calls of MACHINES: none for a socket, a process, a program, a signal, a mount, or another
process, and none that changes owner, mode, times or attributes of a file or locks it as a whole (flock), which Landlock does not
cover. Threads are
allowed. None of it needs a privilege, and code that calls C cannot evade it. x86-64, and AArch64, where it has not been
run.

`run_in_root` makes a forked process a program in namespaces of its own (namespaces(7)): its processes see and outlive nothing
else, and its files are those of the root (sandboxes/local.py). It may start programs, so the filter refuses only less used
doors of the kernel (REFUSED).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import traceback
from typing import Any

OPEN_FILES, THREADS, MAX_OPEN_FILES = 64, 64, 1024
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2  # of prctl(2)
# linux/filter.h: load a word of the system call's data; jump if equal, greater or equal, any bit set; return
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; an argument has 8 bytes
Program = list[tuple[int, int, int, int]]  # (code, jump if true, jump if false, operand)
ALLOW, REFUSE = [(RETURN, 0, 0, 0x7FFF0000)], [(RETURN, 0, 0, 0x00050000 + errno.EPERM)]
ABSENT = [(RETURN, 0, 0, 0x00050000 + errno.ENOSYS)]  # the C library then takes an older call
FIRST_NEW = 424  # from here on, calls have the same number on all machines
CLONE_THREAD, CLONE_NAMESPACES = 0x10000, 0x7E020000

# machine -> (its number in linux/audit.h; clone, prctl, prlimit64, fcntl, ioctl; the calls below FIRST_NEW that are allowed)
MACHINES = {
    "x86_64": (
        *(0xC000003E, 56, 157, 302, 72, 16),
        "0-15 17-28 32-40 60 61 63 74 75 77-89 95-100 102 104 107 108 110 111 115 118 120 121 124-128 131 137 138 140 143"
        " 145-152 158 160 186 187 191-196 201 202 204 213 217-219 221-226 228-233 247 257 258 262-267 269-271 273 277 281-293"
        " 295 296 309 315 316 318 324-332 334",
    ),
    "aarch64": (
        *(0xC00000B7, 220, 167, 261, 25, 29),
        "8-13 17 19-24 34-38 43 44 46-50 56 57 59 61-74 78-80 82-87 90 93-96 98 99 101-103 107-111 113-115 120 121 123 124"
        " 125-128 132-137 139 141 148 150 153 155 156 158 160 163-166 168 169 172-179 213-216 222 223 226-233 236 260 275 276"
        " 278 283-291 293",
    ),
}
NEW_ALLOWED = (436, 439)  # close_range faccessat2
# what the first or second argument may be
PRCTL = (15, 16)  # the name of a thread; not PR_SET_PDEATHSIG, for example
OWN_LIMITS = (0,)  # the process of prlimit64: itself
# fcntl: duplicates, flags and locks; not F_SETOWN, F_SETSIG, F_NOTIFY, F_SETLEASE
FCNTL = (*range(8), *range(36, 39), 1030)
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX


def main() -> None:
    """Runs the code on stdin; the exit code is that of the code, or 1 with a text if it cannot be run.

    SETTINGS: {"stdin": the descriptor of its input, "cpu_s": 10, "memory": bytes, "file": bytes, "uid": 4294900000 or
    null, "readable": ["/usr", ...] or null}.
    """
    settings = json.loads(sys.argv[1])
    code = sys.stdin.buffer.read()
    os.dup2(settings["stdin"], 0)
    os.close(settings.pop("stdin"))
    try:
        give_up(**settings)
    except (OSError, OverflowError) as error:
        sys.exit(f"the program was not run: {error}")
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    try:
        exec(compile(code, "main.py", "exec"), {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the code's own, KeyboardInterrupt too; a traceback without this file
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        sys.exit(1)


def give_up(
    cpu_s: int,
    memory: int | None,
    file: int,
    uid: int | None,
    readable: list[str] | None,
    alive: int,
    processes: int | None = None,
) -> None:
    """Gives up all that the header says. Raises OSError where the system lacks a part of it.

    `alive`: one end of a pipe; the caller has the other end. `processes`: of a program that may start others.
    """
    filter_program = build_filter() if processes is None else build_open_filter()
    _limit(cpu_s, memory, file, processes)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if os.geteuid() == 0:
        raise PermissionError("user 0 runs no program as itself")
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "PR_SET_PDEATHSIG")  # a change of the user clears it
    ended = select.poll()
    ended.register(alive, 0)
    if ended.poll(0):  # before this process, or bwrap's, had asked for the signal
        raise ChildProcessError("its caller has ended")
    os.close(alive)
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if readable is not None:
        _restrict_files(libc, readable)
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in filter_program)
    buffer = ctypes.create_string_buffer(instructions)
    header = struct.pack("HxxxxxxP", len(filter_program), ctypes.addressof(buffer))  # struct sock_fprog
    _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "PR_SET_SECCOMP")


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"the kernel refuses {what} ({os.strerror(ctypes.get_errno())})")
    return result


def _limit(cpu_s: int, memory: int | None, size: int, processes: int | None) -> None:
    bounds = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: resource.RLIM_INFINITY if memory is None else memory,
        resource.RLIMIT_FSIZE: size,
        resource.RLIMIT_NOFILE: OPEN_FILES if processes is None else MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    with contextlib.suppress(OSError), open("/proc/loadavg") as file:  # the limit counts what else this user runs
        bounds[resource.RLIMIT_NPROC] = int(file.read().split()[3].partition("/")[2]) + THREADS
    if processes is not None:  # each sandbox has a user, or a user namespace, of its own
        bounds[resource.RLIMIT_NPROC] = processes
    for kind, bound in bounds.items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (bound, bound))


# -- files: Landlock -----------------------------------------------------------------------------------------------------

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RIGHTS = (0, 13, 14, 15, 15, 16)  # kinds of access of each version of Landlock, as bits of a mask
WRITE_FILE, READ_FILE, READ_DIR = 2, 4, 8


def _restrict_files(libc: ctypes.CDLL, readable: list[str]) -> None:
    version = _check(libc.syscall(CREATE_RULESET, None, 0, 1), "Landlock")
    rights = (1 << RIGHTS[min(version, len(RIGHTS) - 1)]) - 1
    ruleset = _check(libc.syscall(CREATE_RULESET, struct.pack("Q", rights), 8, 0), "a ruleset of Landlock")
    rules = (
        dict.fromkeys(readable, READ_FILE | READ_DIR) | dict.fromkeys(DEVICES, READ_FILE | WRITE_FILE) | {".": rights}
    )
    for path, access in rules.items():
        with contextlib.suppress(FileNotFoundError):
            opened = os.open(path, os.O_PATH)
            mask = access if stat.S_ISDIR(os.fstat(opened).st_mode) else access & ~READ_DIR
            _check(libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", mask, opened), 0), f"a rule for {path}")
            os.close(opened)
    _check(libc.syscall(RESTRICT_SELF, ruleset, 0), "Landlock's restriction")
    os.close(ruleset)


# -- system calls: seccomp -----------------------------------------------------------------------------------------------


def build_filter() -> Program:
    """Builds the filter's instructions. Raises OSError on another machine."""
    if os.uname().machine not in MACHINES:
        raise OSError(f"code cannot be isolated on {os.uname().machine}; only on {', '.join(MACHINES)}")
    architecture, clone, prctl, prlimit, fcntl, ioctl, allowed = MACHINES[os.uname().machine]
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), *REFUSE, (LOAD, 0, 0, NUMBER)]
    program += [(EQUAL, 0, 5, clone), (LOAD, 0, 0, FIRST_ARGUMENT)]
    program += [(ANY_BIT, 1, 0, CLONE_NAMESPACES), (ANY_BIT, 1, 0, CLONE_THREAD), *REFUSE, *ALLOW]
    program += _only(prctl, 0, PRCTL) + _only(prlimit, 0, OWN_LIMITS) + _only(fcntl, 1, FCNTL) + _only(ioctl, 1, IOCTL)
    for number in NEW_ALLOWED:
        program += [(EQUAL, 0, 1, number), *ALLOW]
    program += [(AT_LEAST, 0, 1, FIRST_NEW), *ABSENT]
    for part in allowed.split():
        first, _, last = part.partition("-")
        program += [(AT_LEAST, 1, 0, int(first)), *REFUSE, (AT_LEAST, 1, 0, int(last or first) + 1), *ALLOW]
    return program + REFUSE


def _only(number: int, argument: int, values: tuple[int, ...]) -> Program:
    """Allows a call where the lower half of an argument, which is all the kernel reads of these, is one of `values`."""
    count = len(values)
    program = [(EQUAL, 0, count + 3, number), (LOAD, 0, 0, FIRST_ARGUMENT + 8 * argument)]
    return [*program, *((EQUAL, count - i, 0, value) for i, value in enumerate(values)), *REFUSE, *ALLOW]


# What a program with processes is refused: mounts, namespaces, modules, keys, files by handles, io_uring, bpf, page faults,
# performance events, priorities and cores. All numbers from FIRST_NEW on are absent but those of NEWER.
REFUSED = {
    "x86_64": (
        "101 103 134 135 141 142 144 153-156 159 161-180 203 206-210 212 227 237-239 246 248-251 256 272 278 298 300 301 303-305"
        " 308 310-313 314 319 321 323 333"
    ),
    "aarch64": (
        "0-4 18 30 39-42 51 60 81 89 92 97 104-106 112 116-119 122 140 142 161 162 170 171 217-219 224 225 235-239 241 262-266"
        " 268 270-274 279 280 282 292"
    ),
}
NEWER = (
    424,
    434,
    436,
    437,
    439,
    441,
    449,
    452,
)  # signals by and opening of descriptors of its own processes, openat2, ...
SOCKETS = {"x86_64": 41, "aarch64": 198}
SOCKET_FAMILIES = (1, 2, 10, 16)  # unix, IPv4, IPv6, netlink; not vsock, which reaches the machine under a virtual one


def build_open_filter() -> Program:
    """Builds the filter of a program with processes. Raises OSError on another machine."""
    machine = os.uname().machine
    if machine not in REFUSED:
        raise OSError(f"programs cannot be isolated on {machine}; only on {', '.join(REFUSED)}")
    architecture, clone, *_ = MACHINES[machine]
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), *REFUSE, (LOAD, 0, 0, NUMBER)]
    program += [(EQUAL, 0, 4, clone), (LOAD, 0, 0, FIRST_ARGUMENT), (ANY_BIT, 0, 1, CLONE_NAMESPACES), *REFUSE, *ALLOW]
    program += _only(SOCKETS[machine], 0, SOCKET_FAMILIES)
    for number in NEWER:
        program += [(EQUAL, 0, 1, number), *ALLOW]
    program += [(AT_LEAST, 0, 1, FIRST_NEW), *ABSENT]
    for part in REFUSED[machine].split():
        first, _, last = part.partition("-")
        program += [(AT_LEAST, 0, 2, int(first)), (AT_LEAST, 1, 0, int(last or first) + 1), *REFUSE]
    return program + ALLOW


# -- a root of its own: namespaces ----------------------------------------------------------------------------------------

NAMESPACES = 0x00020000 | 0x08000000 | 0x04000000 | 0x20000000 | 0x02000000  # mount, ipc, uts, pid, cgroup
NEW_USER, NEW_NET = 0x10000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH, PIVOT_ROOT, _CAPSET, PR_CAPBSET_DROP = 2, {"x86_64": 155, "aarch64": 41}, {"x86_64": 126, "aarch64": 91}, 24
SETUP_FAILED = 125  # exit code: the program was not run


def run_in_root(
    arguments: list[str], variables: dict[str, str], root: dict[str, Any], uid: int | None, cores: int, **limits: int
) -> None:
    """Executes a program in a root of its own, and exits with its exit code, or 128 + the signal that ended it.

    `root`: {"at": an empty folder, "readable": [paths], "writable": {path: folder}, "files": {path: text}, "folder": the
    working one, "network": false}. `cores`: that it may use. When its first process ends, the kernel ends all others. That one is
    a shell, which has nothing of the caller's memory.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "PR_SET_PDEATHSIG")
        user, group = os.getuid(), os.getgid()
        namespaces = NAMESPACES | (0 if root["network"] else NEW_NET) | (NEW_USER if user else 0)
        _check(libc.unshare(namespaces), "namespaces")
        if user:
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        usable = sorted(os.sched_getaffinity(0))
        at = os.getpid() % len(usable)
        os.sched_setaffinity(0, (usable[at:] + usable[:at])[:cores])
        first = os.fork()
        if not first:
            _enter(libc, **root)
            for capability in range(64):
                libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
            give_up(uid=uid, readable=None, memory=None, **limits)  # type: ignore[arg-type]
            capset = _CAPSET[os.uname().machine]
            _check(libc.syscall(capset, struct.pack("Ii", 0x20080522, 0), bytes(24)), "giving up capabilities")
            os.chdir(root["folder"])
            for number in range(1, signal.NSIG):  # Python ignores some
                with contextlib.suppress(OSError, ValueError):
                    signal.signal(number, signal.SIG_DFL)
            os.execve("/bin/sh", ["sh", "-c", '"$@"; exit $?', "sh", *arguments], variables)
        code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        os._exit(128 - code if code < 0 else code)
    except (OSError, OverflowError) as error:
        os.write(1, f"the program was not run: {error}".encode())
    os._exit(SETUP_FAILED)


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = (os.fsencode(text) for text in (source, target, kind))
    _check(libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(data)), f"the mount of {target}")


def _bind(libc: ctypes.CDLL, source: str, target: str, flags: int) -> None:
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(source):
        open(target, "w").close()
    _mount(libc, source, target, "", MS_BIND | MS_REC)
    _mount(libc, "", target, "", MS_REMOUNT | MS_BIND | flags)


def _enter(
    libc: ctypes.CDLL,
    at: str,
    readable: list[str],
    writable: dict[str, str],
    files: dict[str, str],
    folder: str,
    network: bool,
) -> None:
    """Builds the root at `at`, and makes it the only one that this process sees."""
    os.umask(0o022)
    _mount(libc, "none", "/", "", MS_REC | MS_PRIVATE)
    _mount(libc, "root", at, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path in readable:
        if os.path.islink(path):  # /lib -> usr/lib
            os.symlink(os.readlink(path), at + path)
        elif os.path.exists(path):
            _bind(libc, path, at + path, MS_RDONLY | MS_NOSUID | MS_NODEV)
    for path in DEVICES:
        _bind(libc, path, at + path, MS_NOSUID | MS_NOEXEC)
    for path, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
        ("shm", "/tmp"),
    ):
        os.symlink(target, f"{at}/dev/{path}")
    os.makedirs(f"{at}/proc")
    _mount(libc, "proc", f"{at}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for path, text in files.items():
        os.makedirs(os.path.dirname(at + path), exist_ok=True)
        with open(at + path, "w") as file:
            file.write(text)
    for path, source in writable.items():
        _bind(libc, source, at + path, MS_NOSUID | MS_NODEV)
    _mount(libc, "", at, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(at)
    _check(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(libc.umount2(b".", MNT_DETACH), "leaving the old root")
    os.chdir("/")
    socket.sethostname("sandbox")
    if not network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:  # the loopback is up: SIOCSIFFLAGS, IFF_UP
            fcntl.ioctl(one, 0x8914, struct.pack("16sH14x", b"lo", 1))


if __name__ == "__main__":
    main()

"""Linux namespaces through libc: processes that see only each other and die together, and no network.

Standard library only. Where the kernel or the container does not allow them, everything here says False.
"""

import contextlib
import ctypes
import os

NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS, SET_SECUREBITS, DROP_BOUND = 36, 38, 28, 24
NO_ROOT_LOCKED = 0b11  # user 0 has no privileges, and the setting is locked
CAPABILITY_VERSION_3 = 0x20080522


def unshare(flags: int) -> bool:
    """Leave the namespaces of `flags`; children of this process are born in the new ones."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(flags) == 0:  # with CAP_SYS_ADMIN
        return True
    if libc.unshare(flags | NEW_USER) != 0:
        return False
    with contextlib.suppress(OSError):  # files get an owner that exists outside
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "wb") as file:
                file.write(text.encode())
    return True


def adopt_orphans() -> None:
    """Descendants whose parent ended become children of this process instead of leaving its tree."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def no_new_privileges() -> None:
    """Nothing that this process starts can gain rights, for example through a set-uid program."""
    ctypes.CDLL(None).prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def drop_root(real_uid: int) -> bool:
    """If run by root: drop all capabilities, also for later execs, and make `real_uid` the real user.

    The kernel counts processes by the real user, and RLIMIT_NPROC does not limit root. The effective user stays, so
    that files stay readable.
    """
    if os.geteuid() != 0:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(SET_SECUREBITS, NO_ROOT_LOCKED, 0, 0, 0)
    for capability in range(64):
        libc.prctl(DROP_BOUND, capability, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.setgroups([])
    try:
        os.setresuid(real_uid, 0, 0)
    except OSError:  # not allowed in this container
        return False
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    return libc.capset(header, (ctypes.c_uint32 * 6)()) == 0


def descendants() -> list[int]:
    """Process ids, as /proc has them, of everything below this process."""
    found: list[int] = []
    waiting = [_own_id()]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _own_id() -> int:
    return int(os.readlink("/proc/self"))  # differs from os.getpid() in a process namespace without a /proc of its own


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += [int(word) for word in file.read().split()]
    return found

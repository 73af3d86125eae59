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
LIBC = ctypes.CDLL(None)


def unshare(flags: int) -> bool:
    """Leave the namespaces of `flags`; children of this process are born in the new ones."""
    uid, gid = os.getuid(), os.getgid()
    if LIBC.unshare(flags) == 0:  # with CAP_SYS_ADMIN
        return True
    if LIBC.unshare(flags | NEW_USER) != 0:
        return False
    with contextlib.suppress(OSError):  # files get an owner that exists outside
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "wb") as file:
                file.write(text.encode())
    return True


def drop_privileges(real_uid: int) -> bool:
    """No later program gains rights. If run by root: drop all capabilities and make `real_uid` the real user.

    The kernel counts processes by the real user, and RLIMIT_NPROC does not limit root. The effective user stays, so
    that files stay readable. Returns whether the real user is another one now.
    """
    LIBC.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.geteuid() != 0:
        return False
    LIBC.prctl(SET_SECUREBITS, NO_ROOT_LOCKED, 0, 0, 0)
    for capability in range(64):
        LIBC.prctl(DROP_BOUND, capability, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.setgroups([])
    try:
        os.setresuid(real_uid, 0, 0)
    except OSError:  # not allowed in this container
        return False
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    return LIBC.capset(header, (ctypes.c_uint32 * 6)()) == 0


def descendants() -> list[int]:
    """Process ids, as /proc has them, of everything below this process."""
    # /proc/self differs from os.getpid() in a process namespace without a /proc of its own
    family = [int(os.readlink("/proc/self"))]
    for pid in family:  # the list grows meanwhile
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    family += map(int, file.read().split())
    return family[1:]

"""Kernel calls that Python lacks, through ctypes. A failure names the step that the kernel refused."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

NEWNS, NEWUTS, NEWIPC, NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
NEWPID, NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
# Attributes for `protect_tree`.
RDONLY, NOSUID, NODEV, NOEXEC = 0x1, 0x2, 0x4, 0x8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_SET_SECCOMP = 1, 4, 38, 24, 22
PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL = 47, 4

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MNT_DETACH = 1, 4, 2
_OPEN_TREE, _MOVE_MOUNT, _CLOSE_RANGE, _MOUNT_SETATTR = 428, 429, 436, 442  # the same on every architecture
_PIVOT_ROOT, _CAPSET = {"x86_64": (155, 126), "aarch64": (41, 91)}.get(platform.machine(), (-1, -1))

_libc = ctypes.CDLL(None, use_errno=True)


class KernelRefused(OSError):
    """The kernel did not allow a step of the isolation."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(number, f"{step}: {os.strerror(number)}")
        self.step = step


def _checked(result: int, step: str) -> int:
    if result < 0:
        raise KernelRefused(step, ctypes.get_errno())
    return result


def _syscall(step: str, number: int, *args: object) -> int:
    # The function is variadic: without c_long the upper half of a register may hold garbage.
    values = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return _checked(_libc.syscall(ctypes.c_long(number), *values), step)


def unshare(flags: int, step: str) -> None:
    """Move this process (NEWPID: its next children) into new namespaces."""
    _checked(_libc.unshare(flags), step)


def setns(fd: int, kind: int) -> None:
    _checked(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str, step: str) -> None:
    _checked(
        _libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode()), step
    )


def clone_tree(path: str) -> int:
    """Copy the mounts at a path; the copy is detached and given as a descriptor."""
    return _syscall("open_tree", _OPEN_TREE, _AT_FDCWD, path.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE)


def protect_tree(fd: int, attributes: int, path: str = "", *, recursive: bool = True) -> None:
    """Set attributes on the mounts of a tree."""
    flags = (_AT_EMPTY_PATH if not path else 0) | (_AT_RECURSIVE if recursive else 0)
    change = struct.pack("QQQQ", attributes, 0, 0, 0)
    _syscall("mount_setattr", _MOUNT_SETATTR, fd, path.encode(), flags, change, len(change))


def attach_tree(fd: int, target: str) -> None:
    """Attach a detached copy at a path."""
    _syscall("move_mount", _MOVE_MOUNT, fd, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)


def pivot_root(new_root: str) -> None:
    """Make a mount the root of this mount namespace and unmount the old root."""
    os.chdir(new_root)
    _syscall("pivot_root", _PIVOT_ROOT, b".", b".")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def sethostname(name: str) -> None:
    _checked(_libc.sethostname(name.encode(), len(name)), "sethostname")


def prctl(option: int, value: object, step: str, *more: int) -> None:
    args = [ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in (value, *more, *[0] * (3 - len(more)))]
    _checked(_libc.prctl(option, *args), step)


def drop_capabilities() -> None:
    """Drop every capability, and the right to gain one by executing a file."""
    _libc.prctl(PR_CAP_AMBIENT, *(ctypes.c_ulong(arg) for arg in (_AMBIENT_CLEAR_ALL, 0, 0, 0)))
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # past the last capability of this kernel
    header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _syscall("capset", _CAPSET, header, data)


def close_all_but(keep: list[int]) -> None:
    """Close every descriptor except those listed: an inherited one could lead out of the sandbox."""
    start = 0
    for fd in [*sorted(set(keep)), 1 << 31]:
        if fd > start:
            _syscall("close_range", _CLOSE_RANGE, start, fd - 1, 0)
        start = fd + 1

"""The seccomp filter of a job, assembled by hand: allowed calls pass, all others fail with EPERM.

A list of what is allowed, not of what is forbidden: a call that a later kernel brings (as io_uring once) stays shut.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import struct

from posttrain.sandbox.kernel import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, KernelRefused, prctl
from posttrain.sandbox.syscalls import allowed_numbers

_LOAD, _JEQ, _JGT, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _ERRNO | errno.EPERM
_ABSENT = _ERRNO | errno.ENOSYS
_PRETEND = _ERRNO  # nothing is done, and the caller is told that it was
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_MODE_FILTER = 2
_X32 = 0x40000000

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_CLONE, _CLONE3 = (56, 220), 435
_SETSID = (112, 157)
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag that clone takes

_BY_ARGUMENT: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {
    # (numbers): which argument, and the values that it may have
    (16, 29): (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIO*
    (72, 25): (1, (*range(12), 36, 37, 38, 1030, 1032)),  # fcntl: flags, locks, copies; not the size of a pipe
    (157, 167): (0, (1, 3, 4, 15, 16, 23, 39, 0x53564D41)),  # prctl: names, PDEATHSIG, DUMPABLE, what only reads
    (302, 261): (0, (0,)),  # prlimit64: oneself
    (53, 199): (0, (1,)),  # socketpair: AF_UNIX
}


def install_filter() -> None:
    """Put the filter on this process and on all that it will start, for good."""
    program = assemble(platform.machine())
    count = len(program) // 8
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", count, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
    prctl(PR_SET_SECCOMP, _MODE_FILTER, "seccomp filter", _address(header))


@functools.cache  # made once, by the template
def assemble(machine: str) -> bytes:
    """The filter as BPF instructions."""
    if machine not in _COLUMN:
        raise KernelRefused(f"seccomp filter for {machine}", errno.ENOSYS)
    column = _COLUMN[machine]
    code = [
        _op(_LOAD, _ARCH),
        _op(_JEQ, _AUDIT_ARCH[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
        _op(_JGE, _X32, 0, 1),
        _op(_RETURN, _KILL),
    ]
    for low, high in _ranges(allowed_numbers(column)):
        code += [_op(_JGE, low, 0, 2), _op(_JGT, high, 1, 0), _op(_RETURN, _ALLOW)]
    code += [_op(_JEQ, _CLONE3, 0, 1), _op(_RETURN, _ABSENT)]  # its flags lie in memory; the C library falls back
    code += [_op(_JEQ, _SETSID[column], 0, 1), _op(_RETURN, _PRETEND)]  # a job is one session: fairness.py
    code += [
        _op(_JEQ, _CLONE[column], 0, 4),
        _op(_LOAD, _ARGUMENT),
        _op(_JSET, _NEW_NAMESPACES, 0, 1),
        _op(_RETURN, _REFUSE),
        _op(_RETURN, _ALLOW),
    ]
    for numbers, (argument, values) in _BY_ARGUMENT.items():
        place, many = _ARGUMENT + 8 * argument, len(values)
        code += [_op(_JEQ, numbers[column], 0, many + 3), _op(_LOAD, place)]
        code += [_op(_JEQ, value, many - i, 0) for i, value in enumerate(values)]
        code += [_op(_RETURN, _REFUSE), _op(_RETURN, _ALLOW)]
    code.append(_op(_RETURN, _REFUSE))
    return b"".join(code)


def _op(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, when_true, when_false, value)


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0

"""The filter of system calls, run by a small interpreter: so both architectures are tested on either of them."""

from __future__ import annotations

import struct

import pytest

from posttrain.sandbox.kernel import KernelRefused, allowed_numbers, assemble

ALLOW, KILL, EPERM, ENOSYS, DONE = 0x7FFF0000, 0x80000000, 0x50001, 0x50026, 0x50000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
JUMPS = {
    0x15: lambda a, k: a == k,
    0x25: lambda a, k: a > k,
    0x35: lambda a, k: a >= k,
    0x45: lambda a, k: bool(a & k),
}


def answer(machine, number, *arguments, arch=None):
    """What the filter says to a call."""
    program = assemble(machine)
    data = struct.pack("=IIQ6Q", number, arch or ARCH[machine], 0, *[*arguments, *[0] * 6][:6])
    place, value = 0, 0
    while True:
        code, yes, no, operand = struct.unpack_from("HBBI", program, place * 8)
        place += 1
        if code == 0x20:
            value = struct.unpack_from("=I", data, operand)[0]
        elif code == 0x06:
            return operand
        else:
            place += yes if JUMPS[code](value, operand) else no


NUMBERS = {
    # x86_64, aarch64
    "read": (0, 63),
    "openat": (257, 56),
    "execve": (59, 221),
    "futex": (202, 98),
    "clone": (56, 220),
    "clone3": (435, 435),
    "setsid": (112, 157),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "socketpair": (53, 199),
    "socket": (41, 198),
    "ptrace": (101, 117),
    "mount": (165, 40),
    "unshare": (272, 97),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "setuid": (105, 146),
}


@pytest.mark.parametrize("machine", ARCH)
def test_calls_on_the_list_pass_and_all_others_do_not(machine):
    column = list(ARCH).index(machine)
    call = {name: numbers[column] for name, numbers in NUMBERS.items()}
    by_arguments = ("clone", "fcntl", "ioctl", "prctl", "prlimit64", "socketpair")
    special = {call[name] for name in (*by_arguments, "clone3", "setsid")}
    allowed = set(allowed_numbers(column))
    assert not allowed & special and len(allowed) > 150
    for number in set(range(600)) - special:
        assert answer(machine, number) == (ALLOW if number in allowed else EPERM), number
    assert {call[name] for name in ("read", "openat", "execve", "futex")} <= allowed
    assert not {call[name] for name in ("socket", "ptrace", "mount", "unshare", "bpf", "setuid")} & allowed


@pytest.mark.parametrize("machine", ARCH)
def test_some_calls_pass_with_some_arguments(machine):
    column = list(ARCH).index(machine)
    call = {name: numbers[column] for name, numbers in NUMBERS.items()}
    assert answer(machine, call["clone"], 17) == ALLOW  # a fork
    assert answer(machine, call["clone"], 0x3D0F00) == ALLOW  # a thread
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer(machine, call["clone"], flag | 17) == EPERM
    assert answer(machine, call["clone3"]) == ENOSYS and answer(machine, call["setsid"]) == DONE
    assert answer(machine, call["ioctl"], 0, 0x5401) == ALLOW and answer(machine, call["ioctl"], 0, 0x5412) == EPERM
    assert answer(machine, call["fcntl"], 0, 1030) == ALLOW and answer(machine, call["fcntl"], 0, 1031) == EPERM
    assert answer(machine, call["prctl"], 15) == ALLOW and answer(machine, call["prctl"], 22) == EPERM
    assert answer(machine, call["prlimit64"], 0) == ALLOW and answer(machine, call["prlimit64"], 1) == EPERM
    assert answer(machine, call["socketpair"], 1) == ALLOW and answer(machine, call["socketpair"], 16) == EPERM


def test_calls_of_another_architecture_end_the_process():
    assert answer("x86_64", 0, arch=0x40000003) == KILL  # the calls of 32 bits, by other numbers
    assert answer("x86_64", 0x40000000) == KILL  # x32
    with pytest.raises(KernelRefused, match="riscv64"):
        assemble("riscv64")

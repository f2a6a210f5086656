"""The attacks: programs from attacks.txt, and system calls that no job may make."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MACHINE_CALLS = {
    # name: (number on x86_64, on aarch64, arguments), called with arguments that do no harm outside
    "mount": (165, 40, ""),
    "umount2": (166, 39, ""),
    "pivot_root": (155, 41, ""),
    "chroot": (161, 51, ""),
    "unshare": (272, 97, "0x10000000"),
    "setns": (308, 268, ""),
    "clone3": (435, 435, ""),
    "ptrace": (101, 117, "0"),
    "process_vm_readv": (310, 270, "1"),
    "process_vm_writev": (311, 271, "1"),
    "pidfd_getfd": (438, 438, ""),
    "kcmp": (312, 272, ""),
    "keyctl": (250, 219, ""),
    "add_key": (248, 217, ""),
    "bpf": (321, 280, "0"),
    "perf_event_open": (298, 241, ""),
    "io_uring_setup": (425, 425, "1"),
    "userfaultfd": (323, 282, "1"),
    "memfd_create": (319, 279, "b'x', 0"),
    "shmget": (29, 194, "0, 4096, 0o1600"),
    "msgget": (68, 186, "0, 0o1600"),
    "mq_open": (240, 180, ""),
    "open_by_handle_at": (304, 265, ""),
    "fanotify_init": (300, 262, ""),
    "init_module": (175, 105, ""),
    "finit_module": (313, 273, "-1"),
    "kexec_load": (246, 104, "0, 1 << 20"),
    "reboot": (169, 142, "0"),
    "swapon": (167, 224, ""),
    "syslog": (103, 116, "2"),
    "settimeofday": (164, 170, "1"),
    "clock_settime": (227, 112, "99"),
    "adjtimex": (159, 171, "1"),
    "sethostname": (170, 161, "1, 65"),
    "personality": (135, 92, "0x0040000"),
    "setuid": (105, 146, "0"),
    "setgroups": (116, 159, "1, 1"),
    "capset": (126, 91, "1, 1"),
    "mknodat": (259, 33, "-100, b'node', 0o20666, 0x101"),
    "quotactl": (179, 60, ""),
    "acct": (163, 89, "b'/nowhere'"),
    "seccomp": (317, 277, "1, 0, 0"),
    "landlock_create_ruleset": (444, 444, "0, 0, 1"),
    "sched_setaffinity": (203, 122, "0, 0, 0"),
    "sched_setscheduler": (144, 119, "0, 1, 1"),
    "setpriority": (141, 140, "0, 0, 5"),
    "setsockopt": (54, 208, "0, 1, 7"),
    "sendmsg": (46, 211, "-1"),
    "sendmmsg": (307, 269, "-1"),
    "socket": (41, 198, "2, 1, 0"),
    "splice": (275, 76, ""),
    "open_tree": (428, 428, ""),
    "fsopen": (430, 430, ""),
    "process_madvise": (440, 440, ""),
    "mlockall": (151, 230, "4"),
    "vhangup": (153, 58, ""),
}
SKIP_OUTSIDE = ("reboot", "vhangup", "setuid", "seccomp", "unshare", "mlockall", "setpriority", "sched_setscheduler")


@dataclass
class Attack:
    """One program; attacks.txt says what its words mean."""

    code: str
    outside: str | None
    ends: tuple[str, ...]


def read_attacks() -> dict[str, Attack]:
    """The attacks by name."""
    found = {}
    text = (Path(__file__).parent / "attacks.txt").read_text()
    for block in re.split(r"^=== ", text, flags=re.M)[1:]:
        head, _, code = re.sub(r"^##### .*$", "", block, flags=re.M).partition("\n")
        name, *words = head.split(" | ")
        options = dict(word.split(": ") for word in words)
        ends = tuple(options.get("ends", "ok error").split())
        found[name] = Attack(code.strip() + "\n", options.get("outside"), ends)
    return found


ATTACKS = read_attacks()

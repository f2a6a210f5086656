"""Kernel calls that Python lacks, through ctypes, and the seccomp filter of a job, assembled by hand.

A failure names the step that the kernel refused. The filter lists what is allowed, not what is forbidden: allowed calls
pass, all others fail with EPERM, and calls that later kernels add (as io_uring once was) stay shut.
"""

from __future__ import annotations

import ctypes
import errno
import functools
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


ALLOWED = """
# memory and threads
mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233
get_mempolicy:239:236 futex:202:98 futex_waitv:449:449 set_robust_list:273:99 get_robust_list:274:100
set_tid_address:218:96 rseq:334:293 membarrier:324:283 getcpu:309:168 arch_prctl:158:- gettid:186:178
sched_yield:24:124 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125
sched_get_priority_min:147:126 sched_rr_get_interval:148:127 sched_getaffinity:204:123 getpriority:140:141
# files
read:0:63 write:1:64 close:3:57 fstat:5:80 stat:4:- lstat:6:- newfstatat:262:79 statx:332:291 lseek:8:62
pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70 preadv2:327:286 pwritev2:328:287
open:2:- openat:257:56 openat2:437:437 creat:85:- access:21:- faccessat:269:48 faccessat2:439:439
flock:73:32 fsync:74:82 fdatasync:75:83 sync_file_range:277:84 truncate:76:45 ftruncate:77:46 fallocate:285:47
fadvise64:221:223 readahead:187:213 getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50
rename:82:- renameat:264:38 renameat2:316:276 mkdir:83:- mkdirat:258:34 rmdir:84:- link:86:- linkat:265:37
unlink:87:- unlinkat:263:35 symlink:88:- symlinkat:266:36 readlink:89:- readlinkat:267:78 chmod:90:- fchmod:91:52
fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55 lchown:94:- fchownat:260:54 umask:95:166 utime:132:-
utimes:235:- utimensat:280:88 futimesat:261:- statfs:137:43 fstatfs:138:44 getxattr:191:8 lgetxattr:192:9
fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13 sendfile:40:71 copy_file_range:326:285
dup:32:23 dup2:33:- dup3:292:24 close_range:436:436
# pipes, events and socket pairs
pipe:22:- pipe2:293:59 select:23:- pselect6:270:72 poll:7:- ppoll:271:73 epoll_create:213:- epoll_create1:291:20
epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:- eventfd2:290:19
signalfd:282:- signalfd4:289:74 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87
recvmsg:47:212 sendto:44:206 recvfrom:45:207 shutdown:48:210 getsockopt:55:209 getsockname:51:204 getpeername:52:205
recvmmsg:299:243
# processes and signals
fork:57:- vfork:58:- execve:59:221 execveat:322:281 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
kill:62:129 tkill:200:130 tgkill:234:131 pidfd_open:434:434 pidfd_send_signal:424:424 getpid:39:172 getppid:110:173
setpgid:109:154 getpgid:121:155 getpgrp:111:- getsid:124:156 rt_sigaction:13:134
rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigqueueinfo:129:138
rt_sigsuspend:130:133 sigaltstack:131:132 restart_syscall:219:128 pause:34:- getuid:102:174 getgid:104:176
geteuid:107:175 getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 capget:125:90 getrlimit:97:163
getrusage:98:165
# time and the machine
nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:-
times:100:153 alarm:37:- getitimer:36:102 setitimer:38:103 timer_create:222:107 timer_settime:223:110
timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111 uname:63:160 sysinfo:99:179 getrandom:318:278
"""


def allowed_numbers(column: int) -> list[int]:
    """List the numbers of the allowed calls; column 0 is x86_64, 1 is aarch64."""
    entries = [word for line in ALLOWED.splitlines() if not line.startswith("#") for word in line.split()]
    numbers = [entry.split(":")[1 + column] for entry in entries]
    return sorted(int(number) for number in numbers if number != "-")


_LOAD, _JEQ, _JGT, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _ERRNO | errno.EPERM
_ABSENT = _ERRNO | errno.ENOSYS
_PRETEND = _ERRNO  # does nothing and reports success
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
    """Install the filter on this process and all that it will start, irrevocably."""
    program = assemble(platform.machine())
    count = len(program) // 8
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", count, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
    prctl(PR_SET_SECCOMP, _MODE_FILTER, "seccomp filter", _address(header))


@functools.cache  # assembled once, by the template
def assemble(machine: str) -> bytes:
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
    # Its flags are in memory, which a filter cannot read; the C library falls back to clone.
    code += [
        _op(_JEQ, _CLONE3, 0, 1),
        _op(_RETURN, _ABSENT),
    ]
    # A job stays one session, for usage.lower_priorities.
    code += [
        _op(_JEQ, _SETSID[column], 0, 1),
        _op(_RETURN, _PRETEND),
    ]
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

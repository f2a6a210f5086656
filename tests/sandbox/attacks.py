"""Programs that try to break out, to stay, or to use too much. Each prints EFFECT if it got what it was after.

`outside` says where the same program does have its effect without a sandbox, which proves that it could have worked:
"always", as "root", or None where trying would harm the machine. `ends` is how the sandbox ends it; most just fail.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """One program."""

    code: str
    outside: str | None = "always"
    ends: tuple[str, ...] = ("ok", "error")


ATTACKS: dict[str, Attack] = {
    # Using too much
    "fork bomb": Attack(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", None, ("timeout", "memory", "processes")
    ),
    "fork bomb of threads": Attack(
        "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(0.3,), daemon=True).start()\n"
        "print('EFFECT')"
    ),
    "memory, one process": Attack("x = bytearray(200 << 20)\nprint('EFFECT')", ends=("memory",)),
    "memory, piece by piece": Attack(
        "x = [bytearray(b'a' * (1 << 20)) for _ in range(200)]\nprint('EFFECT')", ends=("memory",)
    ),
    "memory, many processes": Attack(
        "import os, time\nchildren = []\nfor _ in range(5):\n    pid = os.fork()\n    if pid == 0:\n"
        "        x = bytearray(b'a' * (40 << 20))\n        time.sleep(0.4)\n        os._exit(0)\n    children.append(pid)\n"
        "if all(os.waitpid(pid, 0)[1] == 0 for pid in children): print('EFFECT')",
        ends=("memory",),
    ),
    "memory, shared mapping": Attack(
        "import mmap\nm = mmap.mmap(-1, 200 << 20)\nfor i in range(0, 200 << 20, 4096): m[i] = 1\nprint('EFFECT')",
        ends=("error", "memory"),
    ),
    "disk, many files": Attack("for i in range(20): open(f'f{i}', 'wb').write(b'a' * (1 << 20))\nprint('EFFECT')"),
    "disk, one file": Attack(
        "f = open('f', 'wb')\nfor _ in range(20): f.write(b'a' * (1 << 20))\nf.flush()\nprint('EFFECT')"
    ),
    "disk, a hole": Attack("import os\nfd = os.open('f', 66)\nos.ftruncate(fd, 1 << 30)\nprint('EFFECT')"),
    "disk, /tmp and /dev/shm": Attack(
        "import tempfile\nfor place in (None, '/dev/shm'):\n"
        "    with tempfile.TemporaryFile(dir=place) as f: f.write(b'a' * (6 << 20)); f.flush(); g = f\n"
        "with tempfile.TemporaryFile(dir='/tmp') as f, tempfile.TemporaryFile(dir='/dev/shm') as g:\n"
        "    f.write(b'a' * (6 << 20)); f.flush(); g.write(b'a' * (6 << 20)); g.flush()\nprint('EFFECT')"
    ),
    "inodes": Attack("import os\nfor i in range(4500): os.close(os.open(f'f{i}', 66))\nprint('EFFECT')"),
    "open files": Attack("import os\nfds = [os.open('/dev/null', 0) for _ in range(200)]\nprint('EFFECT')"),
    "pipes full of data": Attack(
        "import os, fcntl\nfor _ in range(40):\n    r, w = os.pipe()\n    fcntl.fcntl(w, 1031, 1 << 20)\n"
        "    os.write(w, b'a' * (1 << 20))\nprint('EFFECT')",
        None,
    ),
    "output without end": Attack("while True: print('x' * 100)", None, ("output",)),
    "output without a newline": Attack("import os\nwhile True: os.write(1, b'x' * 65536)", None, ("output",)),
    "errors without end": Attack("import sys\nwhile True: sys.stderr.write('x' * 100)", None, ("output",)),
    "raising its own limits": Attack(
        "import resource\nfor kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):\n"
        "    resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\nprint('EFFECT')"
    ),
    "core dump": Attack(
        "import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))\nprint('EFFECT')"
    ),
    # Not ending
    "endless loop": Attack("while True: pass", None, ("timeout",)),
    "sleep": Attack("import time\ntime.sleep(1000)", None, ("timeout",)),
    "deaf to signals": Attack(
        "import signal\nfor s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass",
        None,
        ("timeout",),
    ),
    "stops itself": Attack("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", None, ("timeout",)),
    "waits for itself": Attack("import threading\nl = threading.Lock()\nl.acquire()\nl.acquire()", None, ("timeout",)),
    "reads what never comes": Attack("import os\nr, w = os.pipe()\nos.read(r, 1)", None, ("timeout",)),
    "ends in a loop": Attack("import atexit\n@atexit.register\ndef f():\n    while True: pass", None, ("timeout",)),
    "endless compilation": Attack("x = 9**9**9", None, ("timeout", "memory", "error")),
    # Staying behind
    "daemon": Attack(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\n",
        None,
    ),
    "background child that holds the output": Attack("import os, time\nif os.fork() == 0: time.sleep(60)", None),
    "shell job": Attack("import subprocess\nsubprocess.Popen(['sh', '-c', 'nohup sleep 60 &'])", None),
    # Seeing the host
    "password file": Attack("open('/etc/shadow').read()\nprint('EFFECT')", "root"),
    "users of the machine": Attack("if len(open('/etc/passwd').readlines()) > 1: print('EFFECT')"),
    "file of the user": Attack("if open('{secret}').read() == 'secret': print('EFFECT')"),
    "file of the user, by a link": Attack(
        "import os\nos.symlink('{secret}', 'link')\nopen('link').read()\nprint('EFFECT')"
    ),
    "file of the user, by a hard link": Attack(
        "import os\nos.link('{secret}', 'link')\nopen('link').read()\nprint('EFFECT')"
    ),
    "file of the user, by ..": Attack("import os\nopen('/..' * 5 + '{secret}').read()\nprint('EFFECT')"),
    "checkout": Attack("import os\nif os.listdir('{checkout}'): print('EFFECT')"),
    "environment": Attack("import os\nif 'SECRET_TOKEN' in os.environ: print('EFFECT')"),
    "environment of others": Attack(
        "import glob\nfor name in glob.glob('/proc/[0-9]*/environ'):\n    try:\n"
        "        if b'SECRET_TOKEN' in open(name, 'rb').read(): print('EFFECT')\n    except OSError: pass"
    ),
    "/proc": Attack("open('/proc/self/status').read()\nprint('EFFECT')"),
    "memory of others": Attack("import os\nopen(f'/proc/{os.getpid()}/mem', 'rb')\nprint('EFFECT')"),
    "/sys": Attack("import os\nif os.listdir('/sys'): print('EFFECT')"),
    "devices": Attack(
        "import os\nif set(os.listdir('/dev')) - {'null', 'zero', 'random', 'urandom', 'shm'}: print('EFFECT')"
    ),
    "terminals": Attack("import os\nos.openpty()\nprint('EFFECT')"),
    "typing into the terminal": Attack(
        "import fcntl\nfor fd in (0, 1, 2):\n    try:\n        fcntl.ioctl(fd, 0x5412, b'x')\n        print('EFFECT')\n"
        "    except OSError: pass",
        None,
    ),
    "host's name": Attack("import socket\nif socket.gethostname() == '{hostname}': print('EFFECT')"),
    "host's processes": Attack("import os\nos.kill({pid}, 0)\nprint('EFFECT')"),
    "other descriptors": Attack(
        "import os\nfor fd in range(3, 256):\n    try: os.fstat(fd)\n    except OSError: continue\n    print('EFFECT')",
        None,
    ),
    # Changing the host
    "standard library": Attack("import os\nopen(os.__file__, 'a')\nprint('EFFECT')", "root"),
    "installed packages": Attack("open('{site}/evil.py', 'w')\nprint('EFFECT')", None),
    "system programs": Attack("open('/usr/bin/env', 'ab')\nprint('EFFECT')", None),
    "root folder": Attack("import os\nos.mkdir('/evil-{pid}')\nprint('EFFECT')", None),
    "remount": Attack(
        "import ctypes\nif ctypes.CDLL(None).mount(None, b'/usr/lib', None, 0x1020, None) == 0: print('EFFECT')", None
    ),
    "set-user-id program": Attack(
        "import os, shutil\nshutil.copy('/bin/sh', 'sh')\nos.chmod('sh', 0o4755)\nimport subprocess\n"
        "if subprocess.run(['su', '-c', 'true'], capture_output=True).returncode == 0: print('EFFECT')",
        None,
    ),
    # Reaching the network
    "tcp": Attack("import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('EFFECT')"),
    "udp": Attack(
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))\nprint('EFFECT')"
    ),
    "abstract unix socket": Attack(
        "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0posttrain-test-{pid}')\nprint('EFFECT')"
    ),
    "unix socket": Attack("import socket\nsocket.socket(socket.AF_UNIX).connect('{unix}')\nprint('EFFECT')"),
    "raw socket": Attack("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\nprint('EFFECT')", "root"),
    "packet socket": Attack("import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nprint('EFFECT')", "root"),
    "netlink": Attack("import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\nprint('EFFECT')"),
    "vsock": Attack("import socket\nsocket.socket(40, socket.SOCK_STREAM).connect((2, 1))\nprint('EFFECT')", None),
    "listening": Attack("import socket\nsocket.create_server(('127.0.0.1', 0))\nprint('EFFECT')"),
    "names of machines": Attack("import socket\nsocket.getaddrinfo('localhost', 80)\nprint('EFFECT')"),
    "network by another program": Attack(
        "import subprocess\ndone = subprocess.run(['bash', '-c', 'exec 3<>/dev/tcp/127.0.0.1/{port}'], capture_output=True)\n"
        "if done.returncode == 0: print('EFFECT')"
    ),
    # Harming those who watch
    "kills all": Attack("import os\nos.kill(-1, 9)\nprint('alive')", None),
    "kills its parent": Attack(
        "import os, signal, time\nfor s in (9, 19, 2, 15, 11, 3, 1): os.kill(os.getppid(), s)\ntime.sleep(0.05)\nprint('alive')",
        None,
    ),
    "kills its group": Attack("import os\nos.killpg(0, 9)", None),
    "closes its descriptors": Attack("import os\nos.closerange(0, 256)\nos._exit(0)", None),
    "ends its interpreter": Attack("import ctypes\nctypes.string_at(0)", None),
    "fills the box before its end": Attack(
        "import os\ntry:\n    while True: open(os.urandom(4).hex(), 'wb').write(b'a' * 99999)\nexcept OSError: pass",
        None,
    ),
    "locks the box": Attack("import os\nos.chmod('.', 0)\nos.chmod('/tmp', 0)\nos.chmod('/box', 0)", None),
}

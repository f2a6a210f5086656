"""The file system that jobs see: a small read-only root with what Python needs, and /box, which each job owns.

Of the host it shows only the interpreter, its libraries, the system's programs and four devices: no home, no checkout,
no run outputs, no /proc and no /sys.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import sysconfig

from posttrain.sandbox import kernel

BOX, WORK, TMP = "/box", "/box/work", "/box/tmp"
_SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/lib32", "/usr/share/zoneinfo")
_SYSTEM += ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_OUTSIDE_USR = ("/bin", "/lib", "/lib64", "/lib32")  # on most systems these are links into /usr
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_STAGE = "/tmp"  # the new root covers it in our own mount namespace, and it vanishes with the old root
_READ_ONLY = kernel.RDONLY | kernel.NOSUID | kernel.NODEV


def python_paths() -> list[str]:
    """List the files and folders of the running interpreter, its standard library and its installed packages.

    Nothing else of a virtual environment is shown: it may be a folder that holds other things, such as a project's
    root.
    """
    paths = sysconfig.get_paths()
    found = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for prefix in dict.fromkeys([sys.base_prefix, sys.base_exec_prefix]):
        found += [os.path.join(prefix, name) for name in ("bin", "lib", "lib64")]
    found += [sys.executable, os.path.join(sys.prefix, "pyvenv.cfg")]
    found += [os.path.realpath(path) for path in found]
    return _outermost([path for path in found if os.path.exists(path)])


def site_packages() -> list[str]:
    paths = sysconfig.get_paths()
    return [path for path in dict.fromkeys([paths["purelib"], paths["platlib"]]) if os.path.isdir(path)]


def clone_trees(paths: list[str]) -> dict[str, int]:
    """Clone what will be visible, as descriptors by path; this still needs the rights of the user who started us."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE, "", "making the mount tree private")
    trees = {}
    for path in _outermost([*_SYSTEM, *(path for path in _OUTSIDE_USR if not os.path.islink(path)), *paths]):
        if os.path.exists(path):
            trees[path] = kernel.clone_tree(path)
            kernel.protect_tree(trees[path], _READ_ONLY)
    for device in _DEVICES:
        trees[device] = kernel.clone_tree(device)
        kernel.protect_tree(trees[device], kernel.NOSUID | kernel.NOEXEC)
    return trees


def enter_root(trees: dict[str, int]) -> None:
    """Build the new root from the trees and make it the only one."""
    links = [path for path in _OUTSIDE_USR if os.path.islink(path)]
    targets = {path: os.readlink(path) for path in links}
    options = "size=1m,nr_inodes=2000,mode=0755"
    kernel.mount("root", _STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options, "mounting a tmpfs")
    for path, fd in trees.items():
        place = _STAGE + path
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(place, exist_ok=True)
        else:
            _write(place, "")
        kernel.attach_tree(fd, place)
        os.close(fd)
    os.mkdir(_STAGE + BOX)
    for path, target in targets.items():
        os.symlink(target, _STAGE + path)
    # It exists if Python itself lies below /tmp; TMPDIR then points into the box.
    if not os.path.lexists(_STAGE + "/tmp"):
        os.symlink(TMP, _STAGE + "/tmp")
    os.symlink(TMP, _STAGE + "/dev/shm")
    _write(_STAGE + "/etc/passwd", f"user:x:1000:1000::{WORK}:/bin/sh\n")
    _write(_STAGE + "/etc/group", "user:x:1000:\n")
    kernel.pivot_root(_STAGE)
    kernel.protect_tree(-100, _READ_ONLY, "/", recursive=False)


def mount_box(megabytes: int, files: int) -> None:
    """In a job: mount its own empty working folder and /tmp, with this limit for both together."""
    options = f"size={megabytes}m,nr_inodes={files},mode=0700"
    kernel.mount("box", BOX, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options, "mounting a tmpfs")
    os.mkdir(WORK)
    os.mkdir(TMP)


def _outermost(paths: list[str]) -> list[str]:
    unique = sorted({os.path.normpath(path) for path in paths})
    kept: list[str] = []
    for path in unique:
        if not any(path.startswith(parent + "/") for parent in kept):
            kept.append(path)
    return kept


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileExistsError), open(path, "x") as file:
        file.write(text)

"""Files here and on HDFS: paths that begin with `hdfs://` go through the command `hdfs` (HADOOP_HOME)."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

_PREFIX = "hdfs://"


def exists(path: str, **kwargs: Any) -> bool:
    return _hdfs("-test", "-e", path) == 0 if _is_non_local(path) else os.path.exists(path)


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """As os.makedirs; on HDFS a folder that is there is no error."""
    if _is_non_local(name):
        _hdfs("-mkdir", "-p", name)
    else:
        os.makedirs(name, mode=mode, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> Any:
    """As shutil.copy, or copytree for a folder: gives the new path. To or from HDFS: whether it worked."""
    if not (_is_non_local(src) or _is_non_local(dst)):
        return (shutil.copytree if os.path.isdir(src) else shutil.copy)(src, dst, **kwargs)
    if not _is_non_local(dst):
        return _hdfs("-get", src, dst) == 0
    return _hdfs("-cp" if _is_non_local(src) else "-put", "-f", src, dst) == 0


def _is_non_local(path: str) -> bool:
    return str(path).startswith(_PREFIX)


def _hdfs(*arguments: str) -> int:
    home = os.environ.get("HADOOP_HOME")
    program = os.path.join(home, "bin", "hdfs") if home else shutil.which("hdfs")
    if program is None:
        raise FileNotFoundError(
            f"{arguments[-1]} is on HDFS, and there is no command `hdfs` here: install Hadoop's client and set "
            "HADOOP_HOME, or copy the files to a local path first."
        )
    return subprocess.run([program, "dfs", *arguments], check=False).returncode

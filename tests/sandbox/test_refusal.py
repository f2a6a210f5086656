"""Where the kernel refuses: which step, and what to do about it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys

import pytest

from posttrain.config.rollout import SandboxConfig
from posttrain.sandbox import Sandbox, SandboxError
from posttrain.sandbox import sandbox as module
from posttrain.sandbox.sandbox import isolation_error, python_paths

START = "from posttrain.sandbox import Sandbox\nSandbox().start()"


def test_a_kernel_without_user_namespaces_is_named_with_the_sysctl_to_set(box):
    if shutil.which("unshare") is None:
        pytest.skip("needs util-linux")
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    done = subprocess.run(["unshare", "-Ur", "sh", "-c", script, sys.executable, START], capture_output=True, text=True)
    assert done.returncode == 1
    text = done.stderr.partition("SandboxError: ")[2]
    assert text.startswith("the kernel does not let programs be isolated: user namespace: No space left on device")
    assert "sysctl -w user.max_user_namespaces" in text and "reward.sandbox.mode=unsafe" in text


@pytest.mark.parametrize(
    ("step", "number", "words"),
    [
        ("user namespace", errno.EPERM, ["unprivileged_userns_clone", "apparmor_restrict", "seccomp=unconfined"]),
        ("user namespace: writing its map of users", errno.EPERM, ["apparmor_restrict_unprivileged_userns"]),
        ("mounting a tmpfs", errno.EPERM, ["docker run", "--security-opt"]),
        ("mount_setattr", errno.ENOSYS, ["Linux 5.12"]),
        ("seccomp filter for riscv64", errno.ENOSYS, ["reward.sandbox.mode=unsafe"]),
    ],
)
def test_every_refusal_says_what_was_refused_and_what_to_do(step, number, words):
    text = str(isolation_error(step, number))
    assert text.startswith(f"the kernel does not let programs be isolated: {step}: {os.strerror(number)}")
    assert "to do:" in text and "reward.sandbox.mode=unsafe" in text
    assert [word for word in words if word not in text] == []


def test_paths_that_do_not_exist_are_left_out(monkeypatch, box):
    monkeypatch.setattr(module, "python_paths", lambda: [*python_paths(), "/nowhere/lib"])
    with Sandbox() as sandbox:
        assert sandbox.run("import os\nprint(os.path.exists('/nowhere'))").stdout == "False\n"


def test_processes_that_do_not_start_are_an_error_that_says_where_to_look(monkeypatch):
    monkeypatch.setattr(module, "_CODE", "/nowhere")
    with pytest.raises(SandboxError, match="did not start") as caught:
        Sandbox().start()
    assert "import posttrain from /nowhere" in str(caught.value)


def test_unsafe_mode_needs_no_namespaces(box):
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    code = (
        "from posttrain.sandbox import Sandbox\nfrom posttrain.config.rollout import SandboxConfig\n"
        "print(Sandbox(SandboxConfig(mode='unsafe')).run('print(6 * 7)').stdout)"
    )
    done = subprocess.run(["unshare", "-Ur", "sh", "-c", script, sys.executable, code], capture_output=True, text=True)
    assert done.stdout.strip() == "42", done.stderr


def test_other_systems_are_refused_in_words(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="Linux kernel, and this is darwin"):
        Sandbox(SandboxConfig())

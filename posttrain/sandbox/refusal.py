"""What to tell a user whose kernel or container does not let programs be isolated."""

from __future__ import annotations

import errno
import os

from posttrain.errors import UserError

_CONTAINER = (
    "in a container allow user namespaces and mounts: docker run --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined, or --privileged "
    "(Kubernetes: securityContext with seccompProfile Unconfined, or privileged)"
)
_SYSCTL = (
    "as root: sysctl -w kernel.unprivileged_userns_clone=1 (Debian), "
    "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04 and later)"
)
_COUNT = "as root: sysctl -w user.max_user_namespaces=10000 (it is 0, or all are in use)"
_OLD = "use Linux 5.12 or later, which this sandbox needs for read-only copies of mounts"
_UNSAFE = "or set reward.sandbox.mode=unsafe, which runs programs with your rights: only for programs that you trust"


class SandboxError(UserError):
    """Programs cannot be isolated here; says which step was refused and what to do."""


def refused(step: str, number: int | None) -> SandboxError:
    """The error for a step that failed with this errno."""
    why = os.strerror(number) if number else "for no reason given"
    ways = []
    if number == errno.ENOSYS:
        ways.append(_OLD)
    elif number in (errno.ENOSPC, errno.EUSERS) and "namespace" in step:
        ways.append(_COUNT)
    elif step.startswith("user namespace"):
        ways += [_SYSCTL, _CONTAINER]
    else:
        ways.append(_CONTAINER)
    todo = ";\n          ".join([*ways, _UNSAFE])
    return SandboxError(
        f"the kernel does not let programs be isolated: {step}: {why}\n  set in: reward.sandbox.mode=kernel\n"
        f"  to do:  {todo}"
    )


def not_linux(platform: str) -> SandboxError:
    """The error for systems without namespaces."""
    return SandboxError(
        f"programs are isolated by the Linux kernel, and this is {platform}\n  set in: data_source of the data\n"
        "  to do:  run on Linux, or score these rows with a function of your own (custom_reward_function.path)"
    )

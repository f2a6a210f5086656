"""The first rendering of a chat template, as its own program with limits on time and memory.

A template is a program from a model's folder. template_bounds.py stops most endless templates while they are rendered,
but not a single Python operation that does not end or takes all memory, such as `10 ** 10 ** 10` or `'x' * 10 ** 10`.
Here the kernel kills the process, and the run itself is not affected.

Reads JSON from stdin: {"path": sys.path, "template": ..., "variables": {...}, "seconds": ..., "bytes": ...}. Ends with
the status TOO_BIG if memory ran out, with SIGXCPU if time did, and with 0 otherwise: other errors of a template are
reported when it is rendered for a prompt. Imports nothing of posttrain, to start quickly.
"""

import json
import sys

TOO_BIG = 3


def main() -> int:
    job = json.load(sys.stdin)
    sys.path[:] = job["path"]
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """transformers' block around what a model wrote; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(message):
        raise ValueError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: form)
    _limit(job["seconds"], job["bytes"])
    try:
        environment.from_string(job["template"]).render(**job["variables"])
    except MemoryError:
        return TOO_BIG
    except Exception:
        return 0
    return 0


def _limit(seconds: int, size: int) -> None:
    try:
        import resource
    except ImportError:  # not available on this system; the caller still has a deadline
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        used = 0
    resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))


if __name__ == "__main__":
    sys.exit(main())

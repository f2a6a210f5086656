"""The files of the page: as they lie in `static/`, and their modules joined into one script.

The scripts are modules that import each other by one-line statements; joined in the order of their imports they are one
module, as no two of them use the same name at their top. A page of twenty files would ask for each of them.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

SCRIPT = "page.js"  # the name under which the joined modules are served
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.M)
_EXPORT = re.compile(r"^export (?=const|let|function|async)", re.M)


@cache
def static_files() -> set[str]:
    """Names of the files that are served; nothing else is, however it is spelled."""
    folder = resources.files("posttrain.view") / "static"
    return {SCRIPT, *(entry.name for entry in folder.iterdir() if entry.is_file())}


@cache
def static_file(name: str) -> bytes:
    if name == SCRIPT:
        return joined_modules("main.js").encode()
    return (resources.files("posttrain.view") / "static" / name).read_bytes()


def joined_modules(entry: str) -> str:
    """The module and all that it imports, each after what it needs."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for needed in _IMPORT.findall(static_file(name).decode()):
                visit(needed)
            order.append(name)

    visit(entry)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", static_file(name).decode())) for name in order)

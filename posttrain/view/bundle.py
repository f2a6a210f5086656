"""The page as one file: styles, scripts and answers inside, under a policy that lets it ask nobody anything.

The scripts are modules that import each other by one-line statements; joined in the order of their imports they are one
module, as no two of them use the same name at their top.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

from posttrain.view.server import static_file

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.M)
_EXPORT = re.compile(r"^export (?=const|let|function|async)", re.M)
_STYLES = re.compile(r'<link rel="(?:stylesheet|modulepreload|preload)"[^>]*>\n')
_SCRIPTS = re.compile(r"<script [^>]*></script>\n")


def one_file(embedded: dict[str, Any]) -> str:
    """The whole page with these answers in place of a server."""
    page = static_file("index.html").decode()
    style = "\n".join(static_file(name).decode() for name in ("uplot.min.css", "style.css"))
    charts, code = static_file("uplot.min.js").decode(), joined_modules("main.js")
    policy = (
        f"default-src 'none'; script-src {_allowed(charts)} {_allowed(code)}; style-src {_allowed(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(embedded, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    tail = (
        f'<script type="application/json" id="embedded">{data}</script>\n<script>{charts}</script>\n'
        f'<script type="module">{code}</script>\n'
    )
    page = _SCRIPTS.sub("", _STYLES.sub("", page))
    page = page.replace("</head>", head + "</head>").replace("</body>", tail + "</body>")
    return page.encode("utf-8", "replace").decode()


def joined_modules(entry: str) -> str:
    """The module and all that it imports, as one."""
    order = joined_order(entry)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", static_file(name).decode())) for name in order)


def joined_order(entry: str) -> list[str]:
    """The module and all that it imports, each after what it needs."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for needed in _IMPORT.findall(static_file(name).decode()):
                visit(needed)
            order.append(name)

    visit(entry)
    return order


def _allowed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

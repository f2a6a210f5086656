"""The page as one file: styles, scripts and answers inside, under a policy that lets it ask nobody anything."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

from posttrain.view.page import SCRIPT, static_file

_STYLES = re.compile(r'<link rel="(?:stylesheet|preload)"[^>]*>\n')
_SCRIPTS = re.compile(r"<script [^>]*></script>\n")


def one_file(embedded: dict[str, Any]) -> str:
    """The whole page with these answers in place of a server."""
    page = static_file("index.html").decode()
    style = "\n".join(static_file(name).decode() for name in ("uplot.min.css", "style.css"))
    charts, code = static_file("uplot.min.js").decode(), static_file(SCRIPT).decode()
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


def _allowed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

from __future__ import annotations

import json
import sys
import threading
from http.server import HTTPServer

import pytest

from tests.tools.fake_packages import SCHEMA, Schema


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Writes modules into a folder that this process and those that it starts import from."""
    folder = tmp_path / "packages"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in path.parents:
                if parent != folder and folder in parent.parents and not (parent / "__init__.py").exists():
                    (parent / "__init__.py").write_text("")
            path.write_text(text)

    yield write
    for name, module in list(sys.modules.items()):  # another test has other stand-ins
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def serve_schema(packages):
    """Starts a server that describes an environment of OpenEnv; its sessions are those of a stand-in."""
    opened = list[HTTPServer]()

    def serve(schema: object = SCHEMA, port: int = 0) -> tuple[str, type[Schema]]:
        handler = type("Handler", (Schema,), {"answer": json.dumps(schema).encode(), "asked": 0})
        opened.append(server := HTTPServer(("127.0.0.1", port), handler))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"openenv:http://127.0.0.1:{server.server_port}", handler

    yield serve
    for server in opened:
        server.shutdown()
        server.server_close()

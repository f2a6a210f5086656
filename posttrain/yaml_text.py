"""YAML read as OmegaConf does: `1e-6` is a number, a key written twice is an error, dates stay texts.

libyaml reads and writes where PyYAML has it, in a ninth of the time. Its error messages are shorter than those of the
parser in Python, so a text that it rejects is parsed a second time for the message.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
        |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.X,
)
_PREFIX = "tag:yaml.org,2002:"


@cache
def _loaders() -> tuple[Any, Any]:
    """(the fast loader, the one with the better messages)."""
    import yaml

    def make(base: Any) -> Any:
        def construct_mapping(self: Any, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.tag == f"{_PREFIX}str" and key.value in seen:
                    what = f"found duplicate key {key.value}"
                    mark = node.start_mark
                    raise yaml.constructor.ConstructorError("while constructing a mapping", mark, what, key.start_mark)
                seen |= {key.value} if key.tag == f"{_PREFIX}str" else set()
            return base.construct_mapping(self, node, deep=deep)

        loader: Any = type("Loader", (base,), {"construct_mapping": construct_mapping})
        loader.add_implicit_resolver(f"{_PREFIX}float", _FLOAT, list("-+0123456789."))
        loader.yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in rules if tag != f"{_PREFIX}timestamp"]
            for first, rules in loader.yaml_implicit_resolvers.items()
        }
        return loader

    return make(getattr(yaml, "CSafeLoader", yaml.SafeLoader)), make(yaml.SafeLoader)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; a ValueError for what is no YAML."""
    import yaml

    try:
        return _parse(text, text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def dump_yaml(value: Any, **options: Any) -> str:
    """A value as YAML text, its keys in their own order; `options` are those of `yaml.dump`."""
    import yaml

    return yaml.dump(value, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, **options)


def one_line(value: Any) -> str:
    """A value as YAML on one line."""
    text = dump_yaml(value, default_flow_style=True, width=100_000, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def read_yaml(file: Path) -> Any:
    """The content of a YAML file, `{}` for an empty one; raises yaml.YAMLError or ValueError."""
    text = file.read_text(encoding="utf-8")
    if "${" in text:  # a reference that cannot be parsed is an error of the file, which OmegaConf words
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            return OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        except OmegaConfBaseException as error:
            raise ValueError(str(error)) from None
    with file.open(encoding="utf-8") as stream:  # the stream has a name, for messages
        content = _parse(text, stream)
    return {} if content is None else content


def _parse(text: str, source: Any) -> Any:
    import yaml

    fast, exact = _loaders()
    try:
        return yaml.load(text, Loader=fast)
    except (yaml.YAMLError, UnicodeError):
        return yaml.load(source, Loader=exact)

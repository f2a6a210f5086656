"""verl's names, given by posttrain. Importing this is instant: torch comes with the parts that need it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl._missing import install, not_given

if TYPE_CHECKING:
    from verl.protocol import DataProto as DataProto

__version__ = "0.9.1+posttrain"
__all__ = ["DataProto", "__version__"]

install()


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    return not_given(__name__)(name)

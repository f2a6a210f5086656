"""Random numbers by the sample: a score does not depend on which worker computed it, or after what.

Seeding takes longer than many a score, so that only generators which somebody has imported are seeded. One that a
function imports while it scores is seeded there and then.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_GENERATORS = ("random", "numpy.random")


class Seeding:
    """The seed of the sample at hand; stands in `sys.meta_path`, to see generators come."""

    def __init__(self, seed: int = 0) -> None:
        self._base = self._number = seed
        sys.meta_path.insert(0, self)
        for name in _GENERATORS:
            self._seed(sys.modules.get(name))

    def new_sample(self, text: str) -> None:
        self._number = zlib.crc32(text.encode("utf-8", "surrogatepass"), self._base)
        for name in _GENERATORS:
            if name in sys.modules:
                self._seed(sys.modules[name])

    def _seed(self, generator: ModuleType | None) -> None:
        if generator is not None and hasattr(generator, "seed"):  # not a file of the user's with that name
            generator.seed(self._number)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Part of an import: the module as it is found otherwise, but seeded when it has run."""
        if name not in _GENERATORS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_seed(module: ModuleType) -> None:
            run(module)
            self._seed(module)

        spec.loader.exec_module = run_and_seed
        return spec

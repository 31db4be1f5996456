"""Templates that outlive one program."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import torch

from lowerdeck.decompose.calls.template import Template
from lowerdeck.decompose.errors import DecomposeError
from lowerdeck.decompose.rules import Rules

_TABLES = 64


def _settings() -> tuple[Any, ...]:
    """Return the settings of torch that decompositions depend on."""
    backends: Any = torch.backends
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        torch.get_deterministic_debug_mode(),
        torch.get_float32_matmul_precision(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        backends.quantized.engine,
    )


class DecompositionCache:
    """Templates of calls on tensors of fixed sizes, for several programs and threads.

    A second method of a model, or a second model of a family, then needs hardly any tracing. Give
    the same table each time: a rule is known by its identity. What was traced under other settings
    of torch (default dtype or device, deterministic algorithms, autocast) is not reused; modes of
    the user (``TorchFunctionMode``, ``TorchDispatchMode``) are not told apart.

    Args:
        size: How many templates are kept at most; those that were used longest ago go first, as do
            tables, of which at most 64 are told apart.

    Example:
        >>> import torch
        >>> from lowerdeck.decompose import DecompositionCache, decompose
        >>> cache = DecompositionCache()
        >>> program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
        >>> first = decompose(program, cache=cache)
        >>> len(cache)
        1
    """

    def __init__(self, size: int = 4096) -> None:
        if not isinstance(size, int):
            raise DecomposeError(f"found {size!r} as size of a cache, expected an integer")
        if size < 1:
            raise DecomposeError(f"a cache of {size} templates holds nothing: give at least 1")
        self._size = size
        self._lock = Lock()
        self._templates: OrderedDict[Any, Template] = OrderedDict()
        # Tables compare by their content, which is slow: what stands for one stands for all that
        # are equal. Those asked for last come last.
        self._tables: dict[object, Rules] = {}

    def __len__(self) -> int:
        """Return how many templates it holds."""
        with self._lock:
            return len(self._templates)

    def of_rules(self, rules: Rules, writes: bool) -> RulesCache:
        """Return the part of the cache for one table.

        Args:
            rules: The table.
            writes: Whether programs write in place.
        """
        setting = _settings()
        with self._lock:
            table = next(
                (
                    table
                    for table, known in self._tables.items()
                    if known is rules or known.are_same(rules)
                ),
                object(),
            )
            # Insertion order is the order of last use.
            self._tables[table] = self._tables.pop(table, rules)
            if len(self._tables) > min(self._size, _TABLES):
                self._forget(next(iter(self._tables)))
            return RulesCache(self, (table, writes, setting))

    def _forget(self, table: object) -> None:
        """Drop a table with its templates, which nobody can ask for any more."""
        del self._tables[table]
        for key in [key for key in self._templates if key[0][0] is table]:
            del self._templates[key]

    def get(self, key: Any) -> Template | None:
        """Return a template, or None.

        Args:
            key: Its key.
        """
        with self._lock:
            found = self._templates.get(key)
            if found is not None:
                self._templates.move_to_end(key)
            return found

    def put(self, key: Any, template: Template) -> None:
        """Keep a template.

        Args:
            key: Its key.
            template: The template.
        """
        with self._lock:
            self._templates[key] = template
            self._templates.move_to_end(key)
            while len(self._templates) > self._size:
                self._templates.popitem(last=False)


class RulesCache:
    """The part of a cache for one table.

    Args:
        cache: The cache.
        table: What stands for the table in it, with what else it was traced under.
    """

    def __init__(self, cache: DecompositionCache, table: tuple[Any, ...]) -> None:
        self._cache = cache
        self._table = table

    def get(self, key: Any) -> Template | None:
        """Return a template, or None.

        Args:
            key: Its key.
        """
        return self._cache.get((self._table, key))

    def put(self, key: Any, template: Template) -> None:
        """Keep a template.

        Args:
            key: Its key.
            template: The template.
        """
        self._cache.put((self._table, key), template)

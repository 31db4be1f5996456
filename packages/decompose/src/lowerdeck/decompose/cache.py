"""Cache of templates across programs."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import torch

from lowerdeck.decompose.calls.template import Template
from lowerdeck.decompose.errors import DecomposeError
from lowerdeck.decompose.rules import Rules


def _settings() -> tuple[Any, ...]:
    """Return the torch settings that decompositions depend on."""
    backends: Any = torch.backends
    # torch's rules and attention kernels read these during a trace.
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
    """Thread-safe cache of templates of calls with static sizes.

    A second method of a model, or a second model of a family, then needs hardly any tracing. Rules
    are compared by equality. Templates are reused only under equal torch settings (default dtype
    and device, deterministic algorithms, autocast); user modes (``TorchFunctionMode``,
    ``TorchDispatchMode``) are ignored.

    Args:
        size: Maximum number of templates; the least recently used are evicted.

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
            raise DecomposeError(f"found {size!r} as size of a cache; expected an integer")
        if size < 1:
            raise DecomposeError(f"found {size} as size of a cache; expected at least 1")
        self._size = size
        self._lock = Lock()
        self._templates: OrderedDict[Any, Template] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of templates."""
        with self._lock:
            return len(self._templates)

    def get(self, key: Any) -> Template | None:
        """Return the template of a key, or None.

        Args:
            key: Key of the call and ``context``.
        """
        with self._lock:
            template = self._templates.get(key)
            if template is not None:
                self._templates.move_to_end(key)
            return template

    def put(self, key: Any, template: Template) -> None:
        """Store a template.

        Args:
            key: Key of the call and ``context``.
        """
        with self._lock:
            self._templates[key] = template
            self._templates.move_to_end(key)
            while len(self._templates) > self._size:
                self._templates.popitem(last=False)


def context(rules: Rules, writes: bool) -> tuple[Any, ...]:
    """Return the part of a cache key that does not depend on the call.

    Args:
        rules: Tables with the same functions have equal keys.
        writes: Whether the program mutates memory.
    """
    tables = (frozenset(table.items()) for table in (rules.others, rules.composites))
    return (*tables, rules.by_result, writes, *_settings())

"""Copy-on-write copies of tensors."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Any, TypeGuard

import torch

from lowerdeck.torch_base._torch_private import shared_copy, storage_identity
from lowerdeck.torch_base.storage import Extent, MemoryMap

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy-on-write copy where torch supports it, else a real copy.

    Args:
        tensor: Any tensor. Sparse tensors, and memory without a torch allocator (from
            ``torch.load``, numpy or other processes), are copied.

    Returns:
        A tensor with the class (such as ``Parameter``) and ``requires_grad`` of ``tensor``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> copy = lazy_clone(weight)
        >>> with torch.no_grad():
        ...     _ = copy.add_(1)
        >>> weight
        Parameter containing:
        tensor([1., 1.], requires_grad=True)
    """
    source = tensor.detach()
    copied = shared_copy(source)
    return _as(tensor, source.clone() if copied is None else copied)


class OwnCopies:
    """Copies tensors, copy-on-write where supported, and preserves their aliases.

    Args:
        tensors: All tensors that will be copied; other objects are ignored.
    """

    def __init__(self, tensors: Iterable[object]) -> None:
        # Kept alive, because ids and addresses are keys.
        self._originals = [value for value in tensors if _is_plain(value)]
        self._storages = {id(value): storage_identity(value) for value in self._originals}
        self._sharers = Counter(self._storages.values())
        self._lazy: dict[object, torch.Tensor] = {}
        self._parts: dict[Extent, torch.UntypedStorage] = {}

    @cached_property
    def _memory(self) -> MemoryMap:
        """Extents of all tensors; used only if a storage is shared or cannot be cloned lazily."""
        return MemoryMap(map(_in_storage, self._originals))

    def of(self, value: Any) -> Any:
        """Return the copy of a tensor, or other values unchanged."""
        storage = self._storages.get(id(value))
        if storage is not None and self._sharers.pop(storage, 0) == 1:
            # Fast path: most weights do not share their storage; repeated requests are handled
            # below.
            copied = shared_copy(value)
            if copied is not None:
                self._lazy[storage] = copied
                return _as(value, copied)
        if not isinstance(value, torch.Tensor):
            return value
        if not _is_plain(value):
            return lazy_clone(value)
        source = value.detach()
        extent = self._memory.find(_in_storage(value))
        if extent is None:
            return lazy_clone(value)
        # Lazy copies share the whole storage; real copies contain only the extent, because one
        # storage may hold all weights of a file.
        whole = extent.space
        if whole not in self._lazy and extent not in self._parts:
            data = _bytes(source)
            shared = shared_copy(data)
            if shared is None:
                copied = data[extent.start : extent.end].clone()
                self._parts[extent] = copied.untyped_storage()
            else:
                self._lazy[whole] = shared
        lazy = self._lazy.get(whole)
        shift = 0 if lazy is not None else extent.start // source.element_size()
        view = torch.empty(0, dtype=source.dtype, device=source.device)
        view.set_(
            self._parts[extent] if lazy is None else lazy.untyped_storage(),
            source.storage_offset() - shift,
            source.shape,
            source.stride(),
        )
        return _as(value, view)


def _as(original: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Return ``copied`` with the class and requires_grad of ``original``."""
    if isinstance(original, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=original.requires_grad)
    copied = copied.detach() if copied.requires_grad else copied
    return copied.requires_grad_() if original.requires_grad and original.is_leaf else copied


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def _in_storage(tensor: torch.Tensor) -> Extent:
    """Return the extent of ``tensor`` in its storage, with its start aligned to 16 bytes."""
    extent = Extent.of(tensor)
    first = int(tensor.storage_offset()) * tensor.element_size()
    start = first // 16 * 16
    return Extent(storage_identity(tensor), start, first + extent.end - extent.start)


def _is_plain(value: Any) -> TypeGuard[torch.Tensor]:
    return (
        type(value) in _PLAIN
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_conj() or value.is_neg())
    )


def copy_module(module: torch.nn.Module, *, share_parameters: bool = False) -> torch.nn.Module:
    """Return a deep copy of a module that may have computed weights.

    ``torch.nn.utils.weight_norm`` stores its last computed weight as an attribute, which
    ``copy.deepcopy`` rejects because it is not a leaf; here its detached value is copied.

    Args:
        share_parameters: Whether the copy shares the module's parameters.
    """
    memo: dict[int, Any] = {}
    if share_parameters:
        memo.update((id(parameter), parameter) for parameter in module.parameters())
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
    return copy.deepcopy(module, memo)

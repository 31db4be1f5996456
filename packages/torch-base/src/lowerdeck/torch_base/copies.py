"""Copies of tensors that cost nothing until one side writes."""

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
    """Return a copy that shares memory until one side writes, where torch can share it.

    Args:
        tensor: Any tensor. What has no storage (sparse), and memory that torch could not replace
            by its own when it is written, is truly copied: what ``torch.load`` read or mapped,
            what numpy or another process lent. A fake one costs nothing.

    Returns:
        A tensor of the same class, also for parameters, with the same ``requires_grad``.

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
    """Copies tensors, lazily where torch can; copies of tensors that share memory share it.

    Args:
        tensors: All that will be copied. Others among them cost nothing.
    """

    def __init__(self, tensors: Iterable[object]) -> None:
        # Held, so that no identity and no address is given to another one meanwhile.
        self._held = [value for value in tensors if _is_plain(value)]
        self._storages = {id(value): storage_identity(value) for value in self._held}
        self._sharers = Counter(self._storages.values())
        self._whole: dict[object, torch.Tensor] = {}
        self._parts: dict[Extent, torch.UntypedStorage] = {}

    @cached_property
    def _memory(self) -> MemoryMap:
        """The extents of all tensors; needed only if a storage is shared or truly copied."""
        return MemoryMap(map(_in_storage, self._held))

    def of(self, value: Any) -> Any:
        """Return the copy of ``value``; anything but a tensor is returned as it is."""
        storage = self._storages.get(id(value))
        if storage is not None and self._sharers.pop(storage, 0) == 1:
            # Nearly every weight has its storage to itself; a second request finds it below.
            copied = shared_copy(value)
            if copied is not None:
                self._whole[storage] = copied
                return _as(value, copied)
        if not isinstance(value, torch.Tensor):
            return value
        if not _is_plain(value):
            return lazy_clone(value)
        source = value.detach()
        extent = self._memory.find(_in_storage(value))
        if extent is None:
            return lazy_clone(value)
        # A lazy copy is one of the whole storage; a true one is of what is asked for, for all
        # weights read from one file may be parts of one storage.
        whole = extent.space
        if whole not in self._whole and extent not in self._parts:
            data = _bytes(source)
            shared = shared_copy(data)
            if shared is None:
                copied = data[extent.start : extent.end].clone()
                self._parts[extent] = copied.untyped_storage()
            else:
                self._whole[whole] = shared
        lazy = self._whole.get(whole)
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
    """Return ``copied`` as a tensor of the kind of ``original``."""
    if isinstance(original, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=original.requires_grad)
    copied = copied.detach() if copied.requires_grad else copied
    return copied.requires_grad_() if original.requires_grad and original.is_leaf else copied


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def _in_storage(tensor: torch.Tensor) -> Extent:
    """Return the extent of ``tensor`` in its storage, aligned to sixteen bytes for every type."""
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
    """Return a deep copy of a module, also of one whose weights are computed.

    ``torch.nn.utils.weight_norm`` keeps the weight that it computed last as an attribute, of which
    ``copy.deepcopy`` makes no copy because it has a history of gradients; the copy keeps its
    elements, until its next call computes them again.

    Args:
        share_parameters: Whether the copy has the parameters of the module itself.
    """
    memo: dict[int, Any] = {}
    if share_parameters:
        memo.update((id(parameter), parameter) for parameter in module.parameters())
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
    return copy.deepcopy(module, memo)

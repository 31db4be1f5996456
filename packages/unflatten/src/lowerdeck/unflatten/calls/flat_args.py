"""Let a caller pass arguments in another structure than the program was exported with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

from lowerdeck.torch_base import pytree

__all__ = ["FlatArgsAdapter"]

Leaves: TypeAlias = list[Any]
"""The arguments of a call one after the other, out of their tuples, lists and dicts."""


class FlatArgsAdapter(ABC):
    """Turns the flat arguments of one structure into those of another.

    An ``UnflattenedModule`` asks its adapter whenever it is called with a structure that differs
    from the exported one.

    Example:
        >>> import torch
        >>> class DropExtra(FlatArgsAdapter):
        ...     def adapt(self, target_spec, input_spec, input_args, metadata=None, obj=None):
        ...         return input_args[: target_spec.num_leaves]
        >>> from lowerdeck.unflatten import unflatten
        >>> program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
        >>> unflatten(program, DropExtra())(-torch.ones(2), "ignored")
        tensor([0., 0.])
    """

    @abstractmethod
    def adapt(
        self,
        target_spec: pytree.TreeSpec,
        input_spec: pytree.TreeSpec,
        input_args: Leaves,
        metadata: dict[str, Any] | None = None,
        obj: Any = None,
    ) -> Leaves:
        """Return the flat arguments of ``target_spec``, one for each of its leaves.

        Args:
            target_spec: The structure of ``(args, kwargs)`` that the program was exported with.
            input_spec: The structure of this call.
            input_args: The leaves of this call; they may be changed in place.
            metadata: A copy of the metadata of the exported graph module.
            obj: The positional arguments of this call as they were passed.
        """

    def get_flat_arg_paths(self) -> list[str]:
        """Return a name for each adapted argument, for messages; an empty list means no names."""
        return []

"""What is recorded of a tensor that a call returned, and the check of what it returns now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

import torch
from torch.fx import Node, Proxy

from lowerdeck.torch_base import SYMBOLS, expression_of, plain_number
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.channel import Missing
from lowerdeck.unflatten.calls.former_calls import described
from lowerdeck.unflatten.errors import InputConstraintError
from lowerdeck.unflatten.sizes.guards import SizeLimits

SIZES = "sizes"
"""Meta of a node of a graph that was stored: what ``sizes_of`` returns of its value."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is recorded of a tensor.

    Attributes:
        shape: Its sizes; an expression where one varies.
        dtype: Its type.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype


def sizes_of(node: Node) -> Any:
    """Return the ``Sizes`` of a tensor, the expression of a symbol; None of anything else."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        shape = tuple([expression_of(plain_number(size)) for size in value.shape])
        return Sizes(shape, value.dtype)
    if isinstance(value, SYMBOLS):
        return expression_of(value)
    return node.meta.get(SIZES)


@dataclass(frozen=True, slots=True, eq=False)
class ResultCheck:
    """Checks what one call returned.

    Attributes:
        name: The name of what is called.
        recorded: What it returned when it was recorded.
        dims: Each dimension whose size the code after the call knows, with where it does.
        dtype_read: Where that code knows the type; "" where it does not.
        rank_read: Where that code knows the number of dimensions; "" where it does not.
        texts: For each of these dimensions the expression of its size, as the code has it.
        limits: What its sizes that vary must meet; None where nothing.
    """

    name: str
    recorded: Sizes
    dims: tuple[tuple[int, str], ...]
    dtype_read: str
    rank_read: str = ""
    texts: tuple[str, ...] = ()
    limits: SizeLimits | None = None

    def names(self) -> Iterator[str]:
        """Yield the names of the nodes of which the sizes are computed."""
        for text in self.texts:
            yield from (name for _, name, _, _ in Formatter().parse(text) if name)

    def check(self, module: torch.nn.Module, value: Any, *sizes: Any) -> None:
        """Check a result.

        Args:
            module: The caller.
            value: The result.
            sizes: For each dimension the size that the code after the call goes on with.

        Raises:
            InputConstraintError: It has another size, rank or type than that code was recorded
                with.
        """
        body = module.__dict__[PRIVATE]
        # What is missing, whoever reads it says.
        if body.unchecked or isinstance(value, (Proxy, Missing)):
            return
        if not isinstance(value, torch.Tensor):
            raise InputConstraintError(
                f"{self.name!r}{_of(body.type_name)} was changed, and returned {described(value)} "
                f"where the program was recorded with a tensor of shape {self.recorded.shape}. "
                "Return a tensor, or make the change in the model and export that."
            )
        is_alike = value.dim() == len(self.recorded.shape)
        for (dim, where), size in zip(self.dims, sizes, strict=True):
            if not is_alike or value.shape[dim] != size:
                shown = [str(each) for each in self.recorded.shape]
                shown[dim] = str(size)
                raise InputConstraintError(
                    self._told(
                        value,
                        f"a tensor of shape ({', '.join(shown)})",
                        f"knows the size of dimension {dim}",
                        where,
                        body.type_name,
                    )
                )
        if self.rank_read and not is_alike:
            recorded = f"a tensor of {len(self.recorded.shape)} dimensions"
            raise InputConstraintError(
                self._told(value, recorded, "knows that", self.rank_read, body.type_name)
            )
        if self.limits is not None and is_alike and not self.limits.hold_for((value,)):
            told = self.limits.told((value,), ("its result",))
            raise InputConstraintError(
                f"{self.name!r}{_of(body.type_name)} was changed, and returned "
                f"{described(value)}; the program was recorded with {told}. It has no other side "
                "of a branch on such sizes: return what was recorded, or make the change in the "
                "model and export that."
            )
        dtype = self.recorded.dtype
        if self.dtype_read and value.dtype is not dtype and not _may_be(dtype, value, body.moved):
            raise InputConstraintError(
                self._told(
                    value,
                    f"a tensor of {dtype}",
                    "knows its type",
                    self.dtype_read,
                    body.type_name,
                )
            )

    def _told(
        self, value: torch.Tensor, recorded: str, knows: str, where: str, caller: str | None
    ) -> str:
        return (
            f"{self.name!r}{_of(caller)} was changed, and returned {described(value)}; the "
            f"program was recorded with {recorded}, and the code that calls it {knows}: {where}. "
            "Eager's may ask the result for that, and the program cannot. Return what was "
            "recorded, or make the change in the model and export that."
        )


def _of(caller: str | None) -> str:
    return f" of a {caller}" if caller else ""


def _may_be(
    dtype: torch.dtype, value: torch.Tensor, moved: Mapping[torch.dtype, torch.dtype]
) -> bool:
    return moved.get(dtype) is value.dtype or torch.is_autocast_enabled(value.device.type)

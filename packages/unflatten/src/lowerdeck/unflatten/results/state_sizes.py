"""The check that the state which code reads is of the recorded sizes and types.

A module may ask its own weights for their sizes (``alpha / self.down.shape[1]``), and the program
has the answer as a number, as it has those of what calls return.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph

from lowerdeck.unflatten._torch_private import children_of
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.former_calls import described
from lowerdeck.unflatten.calls.recorded_leaves import may_be_of_type
from lowerdeck.unflatten.errors import InputConstraintError
from lowerdeck.unflatten.results.result_check import Sizes, sizes_of


@dataclass(frozen=True, slots=True, eq=False)
class StateCheck:
    """Checks the tensors that the code of a module reads.

    Attributes:
        recorded: Their names, and what they were when the program was recorded.
    """

    recorded: tuple[tuple[str, Sizes], ...]

    def check(self, module: torch.nn.Module) -> None:
        """Check the state of a module.

        Raises:
            InputConstraintError: A tensor has other sizes, or another type.
        """
        body = module.__dict__[PRIVATE]
        if body.unchecked:
            return
        for name, sizes in self.recorded:
            value = _found(module, name)
            if not isinstance(value, torch.Tensor):
                continue  # whoever reads it says so
            is_type = value.dtype is sizes.dtype or may_be_of_type(sizes.dtype, value, body.moved)
            if tuple(value.shape) != sizes.shape or not is_type:
                of = f" of a {body.type_name}" if body.type_name else ""
                raise InputConstraintError(
                    f"{name!r}{of} is {described(value)}; the program was recorded with a tensor "
                    f"of shape {sizes.shape} of {sizes.dtype}, and holds what the module computes "
                    "of that alone. Put an eager module with it in this place, move the module to "
                    "another type, or make the change in the model and export that; "
                    "check_input_constraints = False goes on with what was recorded."
                )


def _found(module: Any, path: str) -> Any:
    *names, last = path.split(".")
    for name in names:
        module = children_of(module).get(name) if isinstance(module, torch.nn.Module) else None
    return getattr(module, last, None)


def state_check(graph: Graph) -> StateCheck | None:
    """Return the check of what a graph reads; None if it reads no tensors."""
    found = tuple(_read(graph))
    return StateCheck(found) if found else None


def _read(graph: Graph) -> Iterator[tuple[str, Sizes]]:
    for node in graph.find_nodes(op="get_attr"):
        sizes = sizes_of(node)
        if isinstance(sizes, Sizes) and all(isinstance(size, int) for size in sizes.shape):
            yield str(node.target), sizes

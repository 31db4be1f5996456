"""Methods that only return constants, such as the longest sequence that a model takes."""

from __future__ import annotations

from typing import Any

import torch

from lowerdeck.emitter.backend.build_plan import PlanBuilder
from lowerdeck.emitter.errors import UnsupportedError
from lowerdeck.emitter.frontend.constants import ConstantPool
from lowerdeck.emitter.frontend.containers import container_metadata
from lowerdeck.emitter.frontend.delegates import DelegatePool
from lowerdeck.emitter.frontend.states import StatePool
from lowerdeck.emitter.frontend.tensors import ValueFactory
from lowerdeck.emitter.ir.instructions import Code
from lowerdeck.serializer import ExecutionPlan
from lowerdeck.torch_base import pytree


def constant_plan(name: str, result: Any, constants: ConstantPool) -> ExecutionPlan:
    """Return a method that returns ``result`` and has no inputs or instructions.

    Args:
        result: A number, bool, text, None or tensor, or a pytree of those.
        constants: The program's constants; extended.

    Raises:
        UnsupportedError: If a leaf of ``result`` is of another type.
    """
    leaves, spec = pytree.tree_flatten(result)
    factory = ValueFactory(name)
    outputs: list[Any] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            outputs.append(factory.constant(f"{name}.{index}", leaf))
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            outputs.append(leaf)
        else:
            raise UnsupportedError(
                f"constant method {name!r} returns a {type(leaf).__name__}; expected a number, "
                "bool, text, None or tensor, or a container of those"
            )
    builder = PlanBuilder(constants, StatePool(zeroed_memory=True), DelegatePool())
    plan = builder.build(Code(name, [], [], [], outputs), [0])
    plan.container_meta_type = container_metadata(pytree.tree_structure(((), {})), spec)
    return plan

"""Constants that are no longer what the program was exported with."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from lowerdeck.torch_base.sources import describe_node

_CONSTANTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_INNER = "export.access_subclass_inner_tensor.default"


def changed_constant(program: ExportedProgram) -> str | None:
    """Return what of a program's first constant does not fit its graph, None if all do.

    A graph is traced for one shape and dtype of each constant. Another tensor in ``state_dict`` or
    ``constants`` would be read as if it were that, past its end or in the wrong type.

    Args:
        program: Any program. Of subclasses of tensors, the tensors that they are made of are
            looked at, as far as the graph names them.

    Returns:
        A sentence without its full stop, with the constant's name and who reads it.

    Example:
        >>> program = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
        >>> changed_constant(program)
        >>> program.state_dict["bias"] = torch.zeros(2)
        >>> changed_constant(program)[:64]
        "found [2] of torch.float32 for 'bias', which aten.linear.default"
    """
    state, constants = program.state_dict, program.constants
    targets = {
        getattr(spec.arg, "name", ""): str(spec.target)
        for spec in program.graph_signature.input_specs
        if spec.kind in _CONSTANTS
    }
    found: dict[object, tuple[str, object]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in targets:
            name = targets[node.name]
            tensor = state.get(name, constants.get(name))
        elif node.op == "call_function" and str(node.target) == _INNER and node.args[0] in found:
            (outer, holder), part = found[node.args[0]], str(node.args[1])
            name, tensor = f"{outer}.{part}", getattr(holder, part, None)
        else:
            continue
        found[node] = name, tensor
        difference = _difference(tensor, node.meta.get("val"))
        if difference is not None:
            reader = next(iter(node.users), None)
            who = f", which {describe_node(reader)} reads" if reader is not None else ""
            return f"{difference[0]} for {name!r}{who}; expected {difference[1]}, as exported"
    return None


def _difference(tensor: object, exported: object) -> tuple[str, str] | None:
    if not isinstance(tensor, torch.Tensor) or not isinstance(exported, torch.Tensor):
        return None
    # Sizes that vary are no constant's; comparing them would add a guard.
    if any(not isinstance(size, int) for size in exported.shape):
        return None
    if (tensor.shape, tensor.dtype) == (exported.shape, exported.dtype):
        return None
    return (
        f"found {list(tensor.shape)} of {tensor.dtype}",
        f"{list(exported.shape)} of {exported.dtype}",
    )

"""How a whole program is called, where its delegate takes and returns flat values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec
from torch.fx import Node

from lowerdeck.lowered_module.errors import SignatureError
from lowerdeck.lowered_module.program.copies import copy_signature
from lowerdeck.torch_base import pytree, set_program_parts


@dataclass(frozen=True, slots=True)
class CallingConvention:
    """What is between a program's caller and its delegate.

    Attributes:
        in_spec: Structure of the arguments and keyword arguments.
        out_spec: Structure of the result.
        constants: Outputs that are no values of the graph (None, numbers, strings), by position.
        mutated: Positions of the inputs that are changed in place. The delegate returns their new
            values first.
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...] = ()
    mutated: tuple[int, ...] = ()

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments as the delegate takes them.

        Args:
            args: Positional arguments of the program.
            kwargs: Keyword arguments of the program, in any order.

        Raises:
            SignatureError: They are structured otherwise than the program's.
        """
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec == self.in_spec:
            return flat
        named = self.in_spec.child(1).context
        if sorted(named) == sorted(kwargs):
            ordered = {name: kwargs[name] for name in named}
            flat, spec = pytree.tree_flatten((args, ordered))
        if spec != self.in_spec:
            raise SignatureError(
                f"found arguments structured as {spec}, expected {self.in_spec}: call the "
                "delegate as the program that was lowered"
            )
        return flat

    def result(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """Return what the program returns, after changing the inputs that it changes.

        Args:
            outputs: What the delegate returned.
            inputs: What it was given.
        """
        for position, value in zip(self.mutated, outputs, strict=False):
            inputs[position].copy_(value)
        leaves = self.with_constants(list(outputs[len(self.mutated) :]))
        return pytree.tree_unflatten(leaves, self.out_spec)

    def with_constants(self, values: list[Any]) -> list[Any]:
        """Return ``values`` with the constant outputs among them."""
        for position, constant in self.constants:
            values.insert(position, constant)
        return values


def flatten_program(program: ExportedProgram) -> CallingConvention:
    """Make ``program``, in place, return values only; return how to call it as before.

    Constant outputs are taken out, and inputs that are changed in place are returned instead.

    Args:
        program: A program whose graph and signature are its own.
    """
    spec = program.call_spec
    output = program.graph.output_node()
    specs = program.graph_signature.output_specs
    inputs = [
        input_spec.arg.name
        for input_spec in program.graph_signature.input_specs
        if input_spec.kind == InputKind.USER_INPUT
    ]
    kept: list[tuple[Any, OutputSpec]] = []
    constants: list[tuple[int, Any]] = []
    mutated: list[int] = []
    returned = 0
    for value, found in zip(output.args[0], specs, strict=True):
        if found.kind == OutputKind.USER_INPUT_MUTATION and found.target is not None:
            mutated.append(inputs.index(found.target))
            kept.append((value, OutputSpec(OutputKind.USER_OUTPUT, found.arg, None)))
            continue
        if found.kind == OutputKind.USER_OUTPUT:
            if not isinstance(value, Node):
                constants.append((returned, value))
                returned += 1
                continue
            returned += 1
        kept.append((value, found))
    if len(kept) != len(specs) or mutated:
        output.args = (tuple(value for value, _ in kept),)
        program.graph_module.recompile()
        signature = copy_signature(program.graph_signature)
        signature.output_specs = [found for _, found in kept]
        set_program_parts(program, graph_signature=signature)
    assert spec.in_spec is not None
    assert spec.out_spec is not None
    return CallingConvention(spec.in_spec, spec.out_spec, tuple(constants), tuple(mutated))

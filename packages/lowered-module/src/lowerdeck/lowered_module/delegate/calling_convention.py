"""Calling convention of a program whose delegate takes and returns flat values."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
)
from torch.fx import Graph, GraphModule, Node

from lowerdeck.lowered_module.errors import SignatureError
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.lowered_module.program.graphs import outputs_of, user_inputs, value_of
from lowerdeck.lowered_module.program.signature import argument_of
from lowerdeck.torch_base import executorch_call_delegate, pytree, set_program_parts


class CallingConvention(NamedTuple):
    """Conversion between a program's arguments and results and those of its delegate.

    Attributes:
        in_spec: Structure of the arguments and keyword arguments.
        out_spec: Structure of the result.
        constants: Position and value of each output that is not a graph value (such as None).
        mutated: Positions of the mutated inputs. The delegate returns their new values first.
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    constants: Sequence[tuple[int, Any]] = ()
    mutated: Sequence[int] = ()

    @classmethod
    def of(cls, program: ExportedProgram) -> CallingConvention:
        """Return the calling convention of ``program``."""
        # ``program.call_spec`` defines a class at each access.
        signature = program.module_call_graph[0].signature
        assert signature is not None
        return cls(signature.in_spec, signature.out_spec)

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the flat arguments of the delegate.

        Args:
            args: Positional arguments of the program.
            kwargs: Keyword arguments of the program, in any order.

        Raises:
            SignatureError: The structure of the arguments differs from the program's.
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
                "delegate with the arguments of the lowered program"
            )
        return flat

    def result(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """Copy the new values of mutated inputs into them, and return the program's result.

        Args:
            outputs: Flat outputs of the delegate.
            inputs: Flat inputs of the delegate.
        """
        for position, value in zip(self.mutated, outputs, strict=False):
            inputs[position].copy_(value)
        leaves = self.with_constants(list(outputs[len(self.mutated) :]))
        return pytree.tree_unflatten(leaves, self.out_spec)

    def with_constants(self, values: list[Any]) -> list[Any]:
        """Return ``values`` with the constant outputs inserted at their positions."""
        for position, constant in self.constants:
            values.insert(position, constant)
        return values


def flatten_program(program: ExportedProgram) -> CallingConvention:
    """Make ``program`` return only graph values, in place; return its calling convention.

    Constant outputs are removed, and mutated inputs are returned instead.

    Args:
        program: A program whose graph and signature no other program shares.
    """
    inputs = [node.name for node in user_inputs(program)]
    kept: list[tuple[Any, OutputSpec]] = []
    constants: list[tuple[int, Any]] = []
    mutated: list[int] = []
    returned = 0
    for value, spec in outputs_of(program):
        is_result = spec.kind == OutputKind.USER_OUTPUT
        if is_result and not isinstance(value, Node):
            constants.append((returned, value))
        elif spec.kind == OutputKind.USER_INPUT_MUTATION:
            mutated.append(inputs.index(str(spec.target)))
            kept.append((value, OutputSpec(OutputKind.USER_OUTPUT, spec.arg, None)))
        else:
            kept.append((value, spec))
        returned += is_result
    if constants or mutated:
        program.graph.output_node().args = (tuple(value for value, _ in kept),)
        program.graph_module.recompile()
        output_specs = [spec for _, spec in kept]
        signature = ExportGraphSignature(program.graph_signature.input_specs, output_specs)
        set_program_parts(program, graph_signature=signature)
    return CallingConvention.of(program)._replace(constants=constants, mutated=mutated)


def single_call_program(
    delegate: torch.nn.Module, inner: ExportedProgram, convention: CallingConvention
) -> ExportedProgram:
    """Return a program that only calls ``delegate``.

    Args:
        inner: The program that the delegate replaces, with flat inputs and outputs.
        convention: The calling convention of the original program.
    """
    graph = Graph()
    arguments: list[Node] = []
    for source in user_inputs(inner):
        arguments.append(graph.placeholder(source.name))
        arguments[-1].meta = {"val": source.meta.get("val")}
    results = [value for value, spec in outputs_of(inner) if spec.kind == OutputKind.USER_OUTPUT]
    returned = list(map(value_of, results))
    call = graph.call_function(executorch_call_delegate, (graph.get_attr(_NAME), *arguments))
    call.meta = {"val": returned, HANDLE: 1}
    parts = [graph.call_function(operator.getitem, (call, n)) for n in range(len(returned))]
    for part, value in zip(parts, returned, strict=True):
        part.meta = {"val": value}
    changed = parts[: len(convention.mutated)]
    results = convention.with_constants(list(parts[len(changed) :]))
    graph.output((*changed, *results))
    root = torch.nn.Module()
    root.add_module(_NAME, delegate)
    input_specs = [
        InputSpec(InputKind.USER_INPUT, argument_of(argument), None) for argument in arguments
    ]
    output_specs = [
        OutputSpec(OutputKind.USER_INPUT_MUTATION, argument_of(part), arguments[index].name)
        for part, index in zip(changed, convention.mutated, strict=True)
    ]
    output_specs += [OutputSpec(OutputKind.USER_OUTPUT, argument_of(r), None) for r in results]
    signature = ModuleCallSignature([], [], convention.in_spec, convention.out_spec)
    return ExportedProgram(
        root=GraphModule(root, graph),
        graph=graph,
        graph_signature=ExportGraphSignature(input_specs, output_specs),
        state_dict={},
        range_constraints=dict(inner.range_constraints),
        module_call_graph=[ModuleCallEntry("", signature)],
        constants={},
    )


_NAME = "lowered_module_0"

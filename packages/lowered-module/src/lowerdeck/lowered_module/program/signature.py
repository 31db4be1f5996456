"""Edit graphs together with their signatures."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    CustomObjArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node

from lowerdeck.lowered_module.errors import OwnershipError
from lowerdeck.lowered_module.program.graphs import MUTATIONS, STATE_MUTATIONS, outputs_of
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG
from lowerdeck.torch_base import pytree, with_parts

OWNABLE_KINDS = (
    InputKind.PARAMETER,
    InputKind.BUFFER,
    InputKind.CONSTANT_TENSOR,
    InputKind.CUSTOM_OBJ,
)
"""The kinds of inputs that a delegate can own, in the order of its inputs."""


@dataclass(slots=True)
class SignatureIndex:
    """Index of a program's signature, for linear time with many partitions.

    Attributes:
        inputs: Each placeholder's spec, by node name.
        outputs: The specs of each node that is an output, by node name.
        values: The tensors and objects of the targets of the specs.
    """

    inputs: Mapping[str, InputSpec] = field(default_factory=dict)
    outputs: Mapping[str, list[OutputSpec]] = field(default_factory=dict)
    values: Mapping[str | None, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, program: ExportedProgram) -> SignatureIndex:
        """Return the index of ``program`` for the current outputs of its graph."""
        outputs: dict[str, list[OutputSpec]] = {}
        for value, spec in outputs_of(program):
            if isinstance(value, Node):
                outputs.setdefault(value.name, []).append(spec)
        return cls(
            inputs={spec.arg.name: spec for spec in program.graph_signature.input_specs},
            outputs=outputs,
            values={**program.constants, **program.state_dict},
        )


def _arrange_placeholders(graph: Graph, owned: Mapping[Node, InputSpec]) -> None:
    def rank(node: Node) -> int:
        kind = owned[node].kind if node in owned else None
        return OWNABLE_KINDS.index(kind) if kind in OWNABLE_KINDS else len(OWNABLE_KINDS)

    placeholders = graph.find_nodes(op="placeholder")
    arranged = sorted(placeholders, key=rank)
    if arranged == placeholders:
        return
    first = next(iter(graph.nodes))
    for node in arranged:
        if node is first:
            first = first.next
        else:
            first.prepend(node)


def sub_program(
    submodule: GraphModule,
    owning_program: ExportedProgram,
    mine: Container[Node],
    call: Node,
    index: SignatureIndex,
) -> tuple[ExportedProgram, dict[str, InputSpec], dict[str, list[OutputSpec]]]:
    """Return a partition as a program, and the specs that it takes over from its owner.

    The partition's inputs are its owned parameters, buffers, lifted constants and custom objects,
    then the arguments of its call; its outputs are mutations of owned buffers, then the values
    that the owning program reads. Each group is in the order of the owning program.

    Args:
        submodule: The partition's graph module, changed in place.
        owning_program: The program that contains the partition.
        mine: The partition's owned placeholders; those of other kinds are ignored.
        call: The owner's call of the partition.
        index: Index of the owner's signature, shared by all partitions.

    Returns:
        The program; the owner's specs of the inputs that it owns, by the owner's node name; and
        the owner's specs of the mutations that it performs, by the name of the owner's node that
        carried the new value.
    """
    graph = submodule.graph
    names: dict[Node, str] = {}
    specs: dict[Node, InputSpec] = {}
    for inner, source in zip(graph.find_nodes(op="placeholder"), call.args, strict=False):
        if inner not in mine:
            # The constant belongs to another partition, or is shared with one.
            inner.meta.pop(DELEGATION_TAG, None)
        spec = index.inputs.get(source.name) if isinstance(source, Node) else None
        if isinstance(source, Node) and spec and inner in mine and spec.kind in OWNABLE_KINDS:
            names[inner], specs[inner] = source.name, spec
    _arrange_placeholders(graph, specs)
    input_specs: list[InputSpec] = []
    state: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for node in graph.find_nodes(op="placeholder"):
        argument = argument_of(node)
        if node not in specs:
            input_specs.append(InputSpec(InputKind.USER_INPUT, argument, None))
            continue
        spec = specs[node]
        if spec.target not in index.values:
            raise OwnershipError(
                f"a partition owns placeholder {names[node]!r}, but its target {spec.target!r} is "
                "neither in the state dict nor among the constants"
            )
        input_specs.append(InputSpec(spec.kind, argument, spec.target, spec.persistent))
        # Non-persistent buffers are among the constants.
        holder = state if spec.target in owning_program.state_dict else constants
        holder[str(spec.target)] = index.values[spec.target]
    owned = {names[node]: spec for node, spec in specs.items()}
    output_specs, mutated = _outputs(submodule, call, index, {s.target for s in owned.values()})
    program = with_parts(
        owning_program,
        graph_module=submodule,
        graph_signature=ExportGraphSignature(input_specs, output_specs),
        state_dict=state,
        constants=constants,
        range_constraints=dict(owning_program.range_constraints),
        module_call_graph=flat_call_graph(input_specs, output_specs),
        verifiers=list(owning_program.verifiers),
        example_inputs=None,
        guards_code=[],
    )
    return program, owned, mutated


def _outputs(
    submodule: GraphModule, call: Node, index: SignatureIndex, owned: set[str | None]
) -> tuple[list[OutputSpec], dict[str, list[OutputSpec]]]:
    """Order the outputs in place; return their specs, and the owner's specs of moved mutations.

    New values of owned buffers come first, then the values that the owner reads. A new value that
    the owner reads too is returned twice.
    """
    readers = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    output = submodule.graph.output_node()
    entries: list[tuple[Any, OutputSpec]] = []
    last_entry: dict[Node, int] = {}
    mutated: dict[str, list[OutputSpec]] = {}
    for position, value in enumerate(cast("Sequence[Any]", output.args[0])):
        reader = readers.get(position)
        specs = [] if reader is None else index.outputs.get(reader.name, [])
        mutations = [
            spec for spec in specs if spec.kind in STATE_MUTATIONS and spec.target in owned
        ]
        if reader is not None and mutations:
            mutated[reader.name] = mutations
            entries += [
                (value, OutputSpec(s.kind, TensorArgument(value.name), s.target))
                for s in mutations
            ]
        # One use is the owner's output of the mutation, which moves to the partition.
        if reader is None or not mutations or len(specs) > len(mutations) or len(reader.users) > 1:
            spec = OutputSpec(OutputKind.USER_OUTPUT, argument_of(value), None)
            entries.append((value, spec))
        if reader is not None:
            last_entry[reader] = len(entries) - 1
    # A stable sort keeps the order within both kinds.
    order = sorted(range(len(entries)), key=lambda entry: entries[entry][1].kind not in MUTATIONS)
    place = {entry: position for position, entry in enumerate(order)}
    for reader, entry in last_entry.items():
        reader.args = (call, place[entry])
    output.args = (tuple(entries[entry][0] for entry in order),)
    return [entries[entry][1] for entry in order], mutated


def flat_call_graph(
    input_specs: Iterable[InputSpec], output_specs: Iterable[OutputSpec]
) -> list[ModuleCallEntry]:
    """Return the module call graph of a program that takes and returns flat tuples.

    Args:
        input_specs: Input specs of the program's signature; only user inputs count.
    """
    inputs = sum(spec.kind == InputKind.USER_INPUT for spec in input_specs)
    outputs = sum(spec.kind == OutputKind.USER_OUTPUT for spec in output_specs)
    in_spec = pytree.tree_structure((tuple([0] * inputs), {}))
    out_spec = pytree.tree_structure(tuple([0] * outputs))
    signature = ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
    return [ModuleCallEntry("", signature)]


def argument_of(value: object) -> Any:
    """Return the argument spec of ``value``, a node or a constant."""
    if not isinstance(value, Node):
        return ConstantArgument("", value)  # type: ignore[arg-type]
    example = value.meta.get("val")
    for kind, record in (
        (torch.SymInt, SymIntArgument),
        (torch.SymFloat, SymFloatArgument),
        (torch.SymBool, SymBoolArgument),
    ):
        if isinstance(example, kind):
            return record(value.name)
    if isinstance(example, CustomObjArgument):
        return CustomObjArgument(value.name, example.class_fqn, example.fake_val)
    if value.op == "placeholder" and (
        example is None or isinstance(example, int | float | bool | str)
    ):
        return ConstantArgument(value.name, example)
    return TensorArgument(value.name)

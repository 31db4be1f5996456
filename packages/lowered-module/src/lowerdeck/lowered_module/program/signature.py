"""Surgery on graphs and on the signatures that describe them."""

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

from lowerdeck.lowered_module.errors import OwnershipError, SignatureError
from lowerdeck.lowered_module.program.graphs import MUTATIONS, STATE_MUTATIONS, outputs_of
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG
from lowerdeck.torch_base import pytree, with_parts

OWNABLE_KINDS = (
    InputKind.PARAMETER,
    InputKind.BUFFER,
    InputKind.CONSTANT_TENSOR,
    InputKind.CUSTOM_OBJ,
)
"""The kinds of inputs that a delegate can own, in the order in which it has them."""


@dataclass(slots=True)
class SignatureIndex:
    """A program's signature, indexed once so that a thousand partitions can ask it.

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
        """Return the index of ``program``, by the nodes that its graph returns at this time."""
        outputs: dict[str, list[OutputSpec]] = {}
        for value, spec in outputs_of(program):
            if isinstance(value, Node):
                outputs.setdefault(value.name, []).append(spec)
        return cls(
            inputs={spec.arg.name: spec for spec in program.graph_signature.input_specs},
            outputs=outputs,
            values={**program.constants, **program.state_dict},
        )


def arrange_graph_placeholders(
    gm: GraphModule, owning_program: ExportedProgram, tag: str
) -> GraphModule:
    """Move the placeholders of ``gm`` in place into the order that a delegate has them in.

    First what the partition owns (placeholders that carry ``tag``): parameters, buffers, lifted
    constants, custom objects; then everything else. Within each kind the order is kept. Other
    nodes do not move.

    Args:
        gm: A partition's graph module, whose placeholders are named like the owner's nodes.
        owning_program: The program that the partition was cut out of.

    Returns:
        ``gm``.
    """
    specs = {spec.arg.name: spec for spec in owning_program.graph_signature.input_specs}
    owned = {n: specs[n.name] for n in _tagged_placeholders(gm.graph, tag) if n.name in specs}
    _arrange_placeholders(gm.graph, owned)
    gm.recompile()
    return gm


def _tagged_placeholders(graph: Graph, tag: str) -> list[Node]:
    placeholders = graph.find_nodes(op="placeholder")
    return [node for node in placeholders if node.meta.get(DELEGATION_TAG) == tag]


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


def arrange_graph_outputs(
    gm: GraphModule, output_specs: list[OutputSpec], call_module_node: Node
) -> GraphModule:
    """Put mutations before the other outputs of ``gm``, in place.

    Args:
        gm: A partition's graph module, whose output is one tuple.
        output_specs: One spec per output; put into the same order, in place.
        call_module_node: The owner's call; the indices of its getitems follow.

    Returns:
        ``gm``.

    Raises:
        SignatureError: The numbers of outputs and specs differ.
    """
    output = gm.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    if len(values) != len(output_specs):
        raise SignatureError(
            f"the graph returns {len(values)} values but {len(output_specs)} output specs were "
            "given: give one spec per value"
        )
    # A stable sort on one bit: within either kind the order stays what callers know.
    order = sorted(range(len(values)), key=lambda i: output_specs[i].kind not in MUTATIONS)
    if order == list(range(len(values))):
        return gm
    output.args = (tuple(values[i] for i in order),)
    output_specs[:] = [output_specs[i] for i in order]
    moved = {old: new for new, old in enumerate(order)}
    for user in list(call_module_node.users):
        if user.target is operator.getitem:
            user.args = (call_module_node, moved[user.args[1]])  # type: ignore[index]
    gm.recompile()
    return gm


def create_exported_program_from_submodule(
    submodule: GraphModule,
    owning_program: ExportedProgram,
    tag: str,
    call_module_node: Node,
    is_submodule: bool,
) -> tuple[ExportedProgram, dict[str, InputSpec], dict[str, OutputSpec]]:
    """Return a partition as a separate program, and the specs that its owner loses by it.

    ``submodule`` is arranged in place. No tensor is copied.

    Args:
        submodule: The partition's graph module, as ``create_submodule_from_nodes`` returns it.
        owning_program: The program that it was cut out of.
        tag: The partition's tag; placeholders that carry it are owned by the partition.
        call_module_node: The owner's call of the partition.
        is_submodule: Whether the call is in a nested graph (a branch of a cond, say), where
            nothing can be owned.

    Returns:
        The program; the owner's input specs that it took, by node name; and the owner's mutation
        specs that it took, by the name of the node that carried the new value.

    Raises:
        OwnershipError: An owned input has no value in the owner.
    """
    index = SignatureIndex() if is_submodule else SignatureIndex.of(owning_program)
    mine = _tagged_placeholders(submodule.graph, tag)
    program, owned, mutated = sub_program(submodule, owning_program, mine, call_module_node, index)
    submodule.recompile()
    return program, owned, {name: specs[0] for name, specs in mutated.items()}


def sub_program(
    submodule: GraphModule,
    owning_program: ExportedProgram,
    mine: Container[Node],
    call: Node,
    index: SignatureIndex,
) -> tuple[ExportedProgram, dict[str, InputSpec], dict[str, list[OutputSpec]]]:
    """Return a partition as a program, and what its owner loses by it.

    The partition's inputs are what it owns (parameters, buffers, lifted constants, custom objects;
    each in the owner's order), then what it is called with, in the owner's order; its outputs are
    the mutations of what it owns, then what the owner reads, in the owner's order.

    Args:
        submodule: The partition's graph module; arranged in place.
        owning_program: The program that it was cut out of.
        mine: Those of its placeholders that it owns, as far as they are of a kind for it.
        call: The owner's call of the partition.
        index: The owner's signature; it serves all partitions.

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
            # It is the tag of another partition, or of one that shares the constant.
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
        # By where the owner has it and not by its kind: a buffer that is not persistent is a
        # constant.
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
    """Arrange the outputs in place; return their specs, and the owner's of what was taken.

    New values of what the partition owns come first, then what the owner reads. A new value that
    the owner reads as well is returned twice, once for either purpose.
    """
    readers = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    output = submodule.graph.output_node()
    values: list[Any] = []
    output_specs: list[OutputSpec] = []
    mutated: dict[str, list[OutputSpec]] = {}
    for position, value in enumerate(cast("Sequence[Any]", output.args[0])):
        reader = readers.get(position)
        specs = [] if reader is None else index.outputs.get(reader.name, [])
        mutations = [
            spec for spec in specs if spec.kind in STATE_MUTATIONS and spec.target in owned
        ]
        if reader is not None and mutations:
            mutated[reader.name] = mutations
            output_specs += [
                OutputSpec(s.kind, TensorArgument(value.name), s.target) for s in mutations
            ]
        # One user is the owner's output, which hands the new value back; that one the partition
        # does now.
        if reader is None or not mutations or len(specs) > len(mutations) or len(reader.users) > 1:
            output_specs.append(OutputSpec(OutputKind.USER_OUTPUT, argument_of(value), None))
        values += [value] * (len(output_specs) - len(values))
        if reader is not None:
            reader.args = (call, len(values) - 1)
    output.args = (tuple(values),)
    arrange_graph_outputs(submodule, output_specs, call)
    return output_specs, mutated


def flat_call_graph(
    input_specs: Iterable[InputSpec], output_specs: Iterable[OutputSpec]
) -> list[ModuleCallEntry]:
    """Return the call graph of a program that takes and returns flat tuples.

    Args:
        input_specs: Of the program's signature; those of the user's inputs count.
    """
    inputs = sum(spec.kind == InputKind.USER_INPUT for spec in input_specs)
    outputs = sum(spec.kind == OutputKind.USER_OUTPUT for spec in output_specs)
    in_spec = pytree.tree_structure((tuple([0] * inputs), {}))
    out_spec = pytree.tree_structure(tuple([0] * outputs))
    signature = ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
    return [ModuleCallEntry("", signature)]


def argument_of(value: object) -> Any:
    """Return the argument record by which a signature names ``value``, a node or a constant."""
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

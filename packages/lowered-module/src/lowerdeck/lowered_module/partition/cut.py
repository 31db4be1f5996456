"""Cut a tagged program into its partitions, without losing what the program knew of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser import CycleError, Region, outline
from lowerdeck.lowered_module._executorch import is_peers
from lowerdeck.lowered_module.authoring.edge_dialect import in_torchs_operators
from lowerdeck.lowered_module.authoring.registry import find_backend
from lowerdeck.lowered_module.partition.grouping import Groups, group_by_tag
from lowerdeck.lowered_module.partition.ownership import settle_ownership
from lowerdeck.lowered_module.program.debug_handles import assign_debug_handles, take_handles
from lowerdeck.lowered_module.program.functional import refuse_lost_mutation
from lowerdeck.lowered_module.program.signature import SignatureIndex, SubProgram, sub_program
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG
from lowerdeck.torch_base import attribute_of


@dataclass(slots=True)
class Cut:
    """One partition on its way from nodes to a delegate.

    Attributes:
        tag: Its tag.
        backend_id: Name of the backend that it goes to.
        backend: The class of that name.
        compile_specs: What that backend is told.
        owner: The graph that it was cut out of.
        call: The node of ``owner`` that calls it.
        part: The partition as a program.
        label: What errors call it: the tag, and the nested graph if any.
    """

    tag: str
    backend_id: str
    backend: Any
    compile_specs: list[Any]
    owner: GraphModule
    call: Node
    part: SubProgram
    label: str


@dataclass(slots=True)
class CutProgram:
    """A program whose partitions were cut out, being worked on in place.

    Attributes:
        program: The working copy.
        cuts: The partitions, those of the outermost graph first, each in the graph's order.
        next_handle: The smallest debug handle above all in use.
    """

    program: ExportedProgram
    cuts: list[Cut]
    next_handle: int


def cut_program(program: ExportedProgram, tags: Mapping[str, Any]) -> CutProgram:
    """Cut the tagged partitions out of ``program``, in place, nested graphs included.

    Args:
        program: A working copy with real weights and tags.
        tags: What each tag means.

    Returns:
        The program with its partitions.

    Raises:
        AliasingError: A cut would lose a write in place.
        BackendNotFoundError: A partition goes to no known backend.
        PartitionError: A node has a tag that may have none.
        OwnershipError: A partition cannot own what it should.
        lowerdeck.graph_fuser.GraphFuserError: A partition's nodes cannot be one call, because a
            value leaves the partition and comes back.
    """
    constraints = dict(program.range_constraints)
    top = program.graph_module
    groups = group_by_tag(top, tags)
    # Of operators of ExecuTorch's own dialect nobody knows what shares memory.
    with in_torchs_operators(program):
        owned = settle_ownership(program, groups, tags)
    next_handle = assign_debug_handles(top)
    # A DelegationSpec of ExecuTorch means a backend of ExecuTorch.
    find = cache(lambda name, is_exirs: find_backend(name, peers=is_exirs))
    cuts = list(_cut_graph(top, groups, owned, tags, program, constraints, find, ""))
    seen: set[int] = {id(top)}
    waiting: list[tuple[str, GraphModule]] = _children(top, "")
    while waiting:
        where, gm = waiting.pop(0)
        if id(gm) in seen:
            continue
        seen.add(id(gm))
        nested = group_by_tag(gm, tags)
        cuts += _cut_graph(gm, nested, {}, tags, program, constraints, find, where)
        waiting += _children(gm, where)
    take_handles(next_handle + len(cuts))
    return CutProgram(program, cuts, next_handle)


def _children(gm: GraphModule, where: str) -> list[tuple[str, GraphModule]]:
    attributes = ((node, attribute_of(gm, node)) for node in gm.graph.find_nodes(op="get_attr"))
    return [
        (f"{where}{node.target}.", child)
        for node, child in attributes
        if isinstance(child, GraphModule)
    ]


def _cut_graph(
    gm: GraphModule,
    groups: Groups,
    owned: Mapping[str, Sequence[Node]],
    tags: Mapping[str, Any],
    program: ExportedProgram,
    constraints: Mapping[Any, Any],
    find: Callable[[str, bool], Any],
    where: str,
) -> Iterator[Cut]:
    if not groups:
        return
    tag_of = {node: tag for tag, nodes in groups.items() for node in nodes}
    refuse_lost_mutation(program, gm, tag_of)
    regions = dict(_regions(gm, groups, owned))
    try:
        outlined_regions = outline(gm, list(regions))
    except CycleError as error:
        names = {name for name in error.regions if name is not None}
        known = [f"{r.name} is partition {tag!r}" for r, tag in regions.items() if r.name in names]
        raise CycleError(f"{error} ({'; '.join(known)})", error.path, error.regions) from None
    # Nothing is owned in nested graphs: what they read, they are given.
    index = SignatureIndex() if where else SignatureIndex.of(program)
    by_call = {one.call_node: (regions[region], one) for region, one in outlined_regions.items()}
    for call in [node for node in gm.graph.nodes if node in by_call]:
        tag, outlined = by_call[call]
        submodule = outlined.module
        _claim(submodule, call, tag, owned.get(tag, ()))
        spec = tags[tag]
        yield Cut(
            tag=tag,
            backend_id=spec.backend_id,
            backend=find(spec.backend_id, is_peers(spec)),
            compile_specs=list(spec.compile_specs),
            owner=gm,
            call=call,
            part=sub_program(submodule, program, tag, call, index, constraints),
            label=f"{tag!r}" + (f" in {where.rstrip('.')}" if where else ""),
        )


def _regions(
    gm: GraphModule, groups: Groups, owned: Mapping[str, Sequence[Node]]
) -> Iterator[tuple[Region, str]]:
    # Tags may hold dots or clash with attributes: the submodules get names of our own.
    number = 0
    for tag, nodes in groups.items():
        while hasattr(gm, f"fused_{number}"):
            number += 1
        # What is owned but not read (an unused weight, a buffer that is only written) is forced.
        inside = set(nodes)
        unread = [node for node in owned.get(tag, ()) if not inside.intersection(node.users)]
        yield Region(f"fused_{number}", nodes, always_return_tuple=True, inputs=unread), tag
        number += 1


def _claim(submodule: GraphModule, call: Node, tag: str, owned: Sequence[Node]) -> None:
    """Mark the placeholders that the partition owns, and no others."""
    mine = set(owned)
    placeholders = submodule.graph.find_nodes(op="placeholder")
    for inner, outer in zip(placeholders, call.args, strict=True):
        if outer in mine:
            inner.meta[DELEGATION_TAG] = tag
        else:
            inner.meta.pop(DELEGATION_TAG, None)

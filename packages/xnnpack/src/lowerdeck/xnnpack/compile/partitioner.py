"""Partitioner: selects the nodes of a program for XNNPACK."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.graph_fuser import propose_partitions
from lowerdeck.lowered_module import (
    CompileSpec,
    DelegationSpec,
    Partitioner,
    PartitionResult,
    constant_names,
    foldable_nodes,
    mode_stretches,
    read_by_one,
    tag_constant_data,
)
from lowerdeck.torch_base import Behaviours, Effect, LazyGraphModule, OpOverload, is_getitem
from lowerdeck.xnnpack.compile.decisions import keep_decisions, restore_supported
from lowerdeck.xnnpack.compile.forecast import UNSEEN, computed_in_float, unseen_weights
from lowerdeck.xnnpack.compile.integer_weights import integer_weights
from lowerdeck.xnnpack.compile.precision import PRECISION, PRECISIONS
from lowerdeck.xnnpack.emit import is_fixed, shape_of
from lowerdeck.xnnpack.errors import XnnpackError
from lowerdeck.xnnpack.operators.contract import ASSERTION, INNER_TENSOR
from lowerdeck.xnnpack.operators.quantization import (
    QUANTIZATION,
    chosen_by,
    is_dynamic,
    is_weight,
    name_of,
)
from lowerdeck.xnnpack.operators.table import OPERATORS, entry_of, refusal
from lowerdeck.xnnpack.patterns import MatchedGraph

NAME = "XnnpackBackend"
Reasons = dict[Node, str | None]


class XnnpackPartitioner(Partitioner):
    """Delegates the nodes that XNNPACK computes like torch, in few partitions.

    Accepts programs from ``torch.export.export`` and decomposed ones, in which it restores
    attention, linear layers and other operators. Programs quantised by PT2E or torchao compute on
    integers where XNNPACK supports it, elsewhere in float.

    Args:
        precision: ``"fp16"`` stores the filters of float32 layers as float16 and computes in
            float32; ``"fp32"`` computes float16 programs in float32, for processors without
            float16 arithmetic. By default dtypes are unchanged.

    Attributes:
        refused: Reasons why nodes of the last program are not delegated, by node name.
        in_float: Reasons why delegated nodes of the last program that read quantised tensors
            compute in float, by node name. Reasons that depend on weight values (scales too far
            apart, zero points) are logged by ``lowerdeck.xnnpack`` instead.
        remarks: For summaries: ``in_float``, and weights quantised by PT2E observers that were
            never run.

    Raises:
        XnnpackError: The precision is none of these.
    """

    def __init__(self, precision: str | None = None) -> None:
        super().__init__()
        if precision not in (None, *PRECISIONS):
            raise XnnpackError(
                f"found the precision {precision!r}, expected None or one of "
                f"{', '.join(map(repr, PRECISIONS))}"
            )
        self.precision: str | None = precision
        self.refused: dict[str, str] = {}
        self.in_float: dict[str, str] = {}
        self.remarks: Mapping[str, Mapping[str, str]] = {}

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag the nodes to delegate; return the program with the specs of its tags.

        Raises:
            QuantizationError: Scales, zero points or other quantisation arguments are invalid.
        """
        constants = constant_names(exported_program)
        behaviours = Behaviours(exported_program.graph_module)
        matched = restore_supported(exported_program, constants)
        foldable = foldable_nodes(matched.graph.nodes, constants)
        generated = _generated(foldable)
        known: Reasons = {}
        first_reasons: dict[str, str] = {}
        while True:
            reasons, partitions, in_float = _proposed(
                exported_program, matched, constants, foldable, generated, known
            )
            # Later reasons may only say that an operand is no longer constant.
            for node, why in reasons.items():
                if why is not None:
                    first_reasons.setdefault(node.name, why)
            # A constant node read by two partitions is in neither and cannot be folded: repeat.
            within = read_by_one(
                foldable, partitions, mode_stretches(matched.graph.nodes, behaviours)
            )
            if len(within) == len(foldable):
                break
            kept = {node.name for node in within}
            still_foldable = foldable_nodes(within, constants)
            changed = set(foldable).difference(still_foldable)
            foldable = still_foldable
            changed.update([user for node in changed for user in node.users])
            changed.update([user for node in changed for user in node.users if is_getitem(user)])
            if any(map(matched.is_new, changed)):
                matched = restore_supported(exported_program, constants, kept)
                nodes = [node for node in matched.graph.nodes if node.name in kept]
                foldable = foldable_nodes(nodes, constants)
            # A quantised layer may depend on constants that it does not read directly.
            known = {
                node: why
                for node, why in reasons.items()
                if in_float is None and node not in changed
            }
        ahead = set(foldable)
        delegated = [node for node, reason in reasons.items() if not reason and node not in ahead]
        unseen: dict[str, str] = {}
        self.in_float = {}
        if in_float is not None:
            names, halves = {node.name for node in delegated}, self.precision != "fp32"
            self.in_float = {
                **{name: why for name, why in in_float.items() if name in names},
                **computed_in_float(delegated, constants, halves=halves),
            }
            unseen = unseen_weights(delegated, constants)
        self.remarks = {"computed in float": self.in_float, UNSEEN: unseen}
        specs = [CompileSpec(PRECISION, self.precision.encode())] if self.precision else []
        tags = {}
        for number, members in enumerate(partitions):
            if any(_computes(node) or _is_slow_move(node) for node in members):
                tag = f"xnnpack_{number}"
                tags[tag] = DelegationSpec(NAME, specs)
                for node in members:
                    node.meta["delegation_tag"] = tag
        _tag_foldable(foldable)
        _tag_pieces(matched)
        _tag_sizes(exported_program)
        _tag_assertions(exported_program, behaviours)
        tagged = {
            tagged_node.name
            for tagged_node in exported_program.graph.nodes
            if "delegation_tag" in tagged_node.meta
        }
        self.refused = {
            node.name: first_reasons[node.name]
            for node, reason in reasons.items()
            # Nodes added for restored layers are not in the program.
            if reason and node.name not in tagged and matched.sources.get(node) != ()
        }
        keep_decisions(exported_program.graph, matched, constants)
        tag_constant_data(exported_program)
        return PartitionResult(exported_program, tags)

    def ops_to_not_decompose(
        self,
        ep: ExportedProgram,
    ) -> tuple[list[OpOverload], Callable[[Node], bool]]:
        """Return the operators to keep undecomposed, and a filter for their calls."""
        constants = constant_names(ep)
        calls = [node for node in ep.graph.nodes if node.op == "call_function"]
        ahead = {*constants, *(node.name for node in foldable_nodes(calls, constants))}
        whole = [op for op in OPERATORS if isinstance(op, OpOverload)]
        quantising = [
            target
            for target in dict.fromkeys(node.target for node in calls)
            if isinstance(target, OpOverload) and str(target) in QUANTIZATION
        ]

        def is_taken(call: Node) -> bool:
            # ExecuTorch fails on calls that are kept undecomposed but not delegated.
            return str(call.target) in QUANTIZATION or refusal(call, ahead) is None

        return [*whole, *quantising], is_taken


_MOST_FOLDED = 1024
"""Largest result in bytes that the emitter computes ahead of time."""


def _tag_pieces(whole: MatchedGraph) -> None:
    """Copy the tag of each matched call to the nodes of the program that it replaced."""
    for node, sources in whole.sources.items():
        tag = node.meta.get("delegation_tag")
        for source in sources:
            if tag is not None:
                source.meta["delegation_tag"] = tag
            else:
                source.meta.pop("delegation_tag", None)


def _generated(foldable: Sequence[Node]) -> set[str]:
    """Return the names of foldable calls without weights and with small results, like positions.

    The emitter folds these calls unless they are in a delegate.
    """
    generated: set[str] = set()
    for node in foldable:
        value = node.meta["val"]
        is_small = isinstance(value, torch.Tensor) and value.nbytes <= _MOST_FOLDED
        if is_small and all(source.name in generated for source in node.all_input_nodes):
            generated.add(node.name)
    return generated


def _proposed(
    program: ExportedProgram,
    whole: MatchedGraph,
    constants: Collection[str],
    foldable: Sequence[Node],
    generated: Collection[str],
    known: Reasons,
) -> tuple[Reasons, Sequence[Sequence[Node]], dict[str, str] | None]:
    """Return each node's reason for refusal (or None), the partitions, and layers in float.

    The reasons for float are by name of the layer; None if nothing is quantised.

    Args:
        known: Reasons that did not change since the last proposal.
    """
    nodes = [node for node in whole.graph.nodes if node.op == "call_function"]
    ahead = {*constants, *(node.name for node in foldable)}
    reasons: Reasons = {}
    for node in nodes:
        if node in known:
            reasons[node] = known[node]
        elif whole.is_new(node):  # Checked when it was restored.
            reasons[node] = None
        elif node.name in generated and node.name not in ahead:
            reasons[node] = "it depends on no input, and calls outside the delegate read it"
        else:
            reasons[node] = refusal(node, ahead, reasons)
    in_float, groups = None, list[Sequence[Node]]()
    if any(name_of(node) in QUANTIZATION for node in nodes):
        delegated = [node for node, reason in reasons.items() if reason is None]
        in_float, left = integer_weights(delegated, constants)
        reasons.update(left)
        _refuse_unread_operands(reasons, constants, whole)
        delegated = [node for node, reason in reasons.items() if not reason]
        groups = list(_inseparable(delegated, constants))
    graph = nodes[0].graph if nodes else program.graph
    proposal = propose_partitions(
        program.graph_module
        if graph is program.graph
        else LazyGraphModule(program.graph_module, graph),
        lambda node: node in reasons and reasons[node] is None,
        groups=groups,
    )
    return reasons, proposal.partitions, in_float


def _tag_foldable(foldable: Sequence[Node]) -> None:
    """Tag foldable nodes with the partition that reads them."""
    for node in reversed(foldable):
        node.meta.pop("delegation_tag", None)
        tags = {user.meta.get("delegation_tag") for user in node.users}
        if len(tags - {None}) == 1:
            (node.meta["delegation_tag"],) = tags - {None}


def _tag_assertions(program: ExportedProgram, behaviours: Behaviours) -> None:
    """Tag assertions on tensors of a partition."""
    if not program.graph.find_nodes(op="call_function", target=ASSERTION, sort=False):
        return
    switched, seen = set[Node](), list[Node]()
    for node in program.graph.nodes:
        if node.target is ASSERTION:
            (source,) = node.all_input_nodes
            tag = source.meta.get("delegation_tag")
            # A partition cannot span a mode switch.
            if tag is not None and source not in switched:
                node.meta["delegation_tag"] = tag
        elif behaviours.effect(node) & Effect.MODE:
            switched.update(seen)
            seen.clear()
        else:
            seen.append(node)


def _computes(node: Node) -> bool:
    entry = entry_of(node)
    return entry is not None and entry.computes


def _is_slow_move(node: Node) -> bool:
    """Return whether a node is a high-rank permute of dynamic sizes, as in window partitioning.

    The portable kernel is much slower than XNNPACK.
    """
    if node.target not in _PERMUTATIONS or len(shape_of(node)) < _WINDOWS:
        return False
    return sum(not is_fixed(size) for size in shape_of(node)) > 1


_PERMUTATIONS = (
    *(torch.ops.aten.permute.default, torch.ops.aten.permute_copy.default),
    torch.ops.aten.transpose.int,
)
_WINDOWS = 6
"""Rank of images partitioned into windows."""


def _tag_sizes(program: ExportedProgram) -> None:
    """Tag sizes that only one partition reads: it can compute them from its inputs."""
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), (int, torch.SymInt)):
            continue
        sources = [source.meta.get("val") for source in node.all_input_nodes]
        if any(
            isinstance(value, torch.Tensor) and value.dtype == torch.int64 for value in sources
        ):
            # Sizes of token ids, which XNNPACK cannot read.
            continue
        tags = {user.meta.get("delegation_tag") for user in node.users}
        if len(tags) == 1 and None not in tags:
            (node.meta["delegation_tag"],) = tags


def _only_prepares_operand(node: Node, constants: Collection[str]) -> bool:
    """Return whether a node only prepares an operand of a layer."""
    if name_of(node) == INNER_TENSOR or is_weight(node, constants) or is_dynamic(node):
        return True
    source = node.args[0] if node.args else None
    is_item = node.op == "call_function" and "getitem" in str(node.target)
    return is_item and isinstance(source, Node) and is_dynamic(source)


def _refuse_unread_operands(
    reasons: Reasons, constants: Collection[str], whole: MatchedGraph
) -> None:
    """Refuse operands that only a refused layer reads, and layers with refused operands."""
    changed = True
    while changed:
        changed = False
        for node in reversed([node for node, reason in reasons.items() if reason is None]):
            for other, why in _companions(node, constants, whole):
                if reasons.get(other, "it is not delegated") is not None:
                    reasons[node], changed = why or reasons[other], True
                    break


def _companions(
    node: Node, constants: Collection[str], whole: MatchedGraph
) -> Iterator[tuple[Node, str | None]]:
    """Yield nodes without which a node is not delegated, each with the reason to report."""
    for reader in node.users if _only_prepares_operand(node, constants) else ():
        if reader.target is not ASSERTION:
            yield reader, f"{reader.name}, which reads it, is left to other kernels"
    entry = entry_of(node)
    packs, dynamic = entry is not None and entry.packs, is_dynamic(node)
    for source in node.all_input_nodes:
        if packs and is_weight(source, constants):
            yield source, f"its weight {source.name} is left to other kernels"
        if dynamic and source.op == "call_function" and is_dynamic(chosen_by(source)):
            yield source, f"{source.name}, which quantises it, is left to other kernels"
        if whole.sources.get(source) == ():
            yield source, None  # added for a restored layer only


def _inseparable(nodes: Sequence[Node], constants: Collection[str]) -> Iterable[Sequence[Node]]:
    """Return groups of nodes that must be in one partition.

    Nodes that only prepare operands of a layer are grouped with it.
    """
    groups: dict[Node, list[Node]] = {}
    for node in nodes:
        if _only_prepares_operand(node, constants):
            for user in node.users:
                if user.target is not ASSERTION:
                    _join(groups, node, user)
    return {id(group): group for group in groups.values()}.values()


def _join(groups: dict[Node, list[Node]], first: Node, second: Node) -> None:
    group, right = groups.get(first, [first]), groups.get(second, [second])
    if group is not right:
        group = [*group, *right]
        groups.update(dict.fromkeys(group, group))

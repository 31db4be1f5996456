"""A partitioner that selects node by node."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from lowerdeck.graph_fuser import Proposal, Reason, propose_partitions
from lowerdeck.lowered_module.authoring.backend import CompileSpec
from lowerdeck.lowered_module.authoring.partitioner import (
    DelegationSpec,
    Partitioner,
    PartitionResult,
)
from lowerdeck.lowered_module.authoring.rejects import WhyNoPartitionReporter
from lowerdeck.lowered_module.program.constants import (
    constant_names,
    tag_constant_data,
    tag_mutated_buffer,
)
from lowerdeck.lowered_module.program.foldable import (
    ASSERTION,
    foldable_nodes,
    mode_stretches,
    read_by_one,
)
from lowerdeck.lowered_module.program.tags import AHEAD, DELEGATION_TAG
from lowerdeck.torch_base import Behaviours, OpOverload, graphs_of, is_getitem


class NodePartitioner(Partitioner):
    """Delegate all nodes without an objection, also in nested graphs.

    Args:
        compile_specs: The compile specs of each partition.
        min_nodes: Smallest number of nodes in a partition.
        owns_state: Whether delegates own the buffers that they mutate.
        computes_ahead: Whether to fold nodes with an objection that depend on no input of the
            program (masks, positions), if only one partition reads them. The backend must
            compile from a ``PartitionView``, which has them among the constants.

    Attributes:
        report: Why nodes of the last partitioned program are not delegated.
        known: Names of constant placeholders and folded calls, for use in ``objection``.

    Example:
        >>> class Relus(NodePartitioner):
        ...     def objection(self, node):
        ...         return None if "relu" in str(node.target) else "it is not a relu"
        >>> partitioner = Relus("MyBackend", min_nodes=2)
    """

    def __init__(
        self,
        backend_id: str,
        *,
        compile_specs: Sequence[CompileSpec] = (),
        min_nodes: int = 1,
        owns_state: bool = False,
        computes_ahead: bool = False,
    ) -> None:
        super().__init__()
        self.backend_id = backend_id
        self.compile_specs = compile_specs
        self.min_nodes = min_nodes
        self.owns_state = owns_state
        self.computes_ahead = computes_ahead
        self.report: WhyNoPartitionReporter = WhyNoPartitionReporter()
        self.known: Collection[str] = frozenset()

    @abstractmethod
    def objection(self, node: Node) -> str | None:
        """Return the reason why ``node`` is not delegated, or None.

        Args:
            node: A call in the program or in a nested graph, except ``getitem``, which is
                delegated with its argument.
        """

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with tags."""
        self.report = WhyNoPartitionReporter()
        tags: dict[str, DelegationSpec] = {}
        constants = constant_names(exported_program)
        for gm in graphs_of(exported_program.graph_module):
            # Nested graphs get all values as inputs.
            own = constants if gm is exported_program.graph_module else {}
            proposal, ahead = self._proposal(gm, own)
            for node in gm.graph.nodes:
                node.meta.pop(AHEAD, None)
            small = [n for n, why in proposal.left_out.items() if why.reason is Reason.TOO_SMALL]
            for nodes in proposal.partitions:
                visited = [node for node in nodes if node not in ahead]
                if len(visited) < max(self.min_nodes, 1):
                    small += visited
                    continue
                tag = f"{self.backend_id} {len(tags)}"
                tags[tag] = DelegationSpec(self.backend_id, list(self.compile_specs))
                for node in visited:
                    node.meta[DELEGATION_TAG] = tag
                for node in _with_assertions(_read_by(visited, ahead)):
                    node.meta |= {DELEGATION_TAG: tag, AHEAD: True}
            for node in small:
                # Elements of a tuple follow its producer, whose reason suffices.
                if not is_getitem(node):
                    self.report.report_reject(
                        node, f"its partition would have fewer than {self.min_nodes} nodes"
                    )
        tag_constant_data(exported_program)
        if self.owns_state:
            tag_mutated_buffer(exported_program)
        reasons = self.report.reasons.items()
        self.refused: Mapping[str, str] = {node.name: reason for node, reason in reasons}
        return PartitionResult(exported_program, tags)

    def _proposal(
        self, gm: GraphModule, constants: Collection[str]
    ) -> tuple[Proposal, Collection[Node]]:
        """Return the partitions of a graph, and the calls that are folded."""
        calls = [
            node
            for node in gm.graph.nodes
            if self.computes_ahead and (isinstance(node.target, OpOverload) or is_getitem(node))
        ]
        stretches = mode_stretches(gm.graph.nodes, Behaviours(gm)) if calls else {}
        while True:
            ahead = self._ahead(calls, constants)
            self.known = {*constants, *(node.name for node in ahead)}
            asserted = {*_with_assertions(ahead)} - ahead.keys()
            reasons = {
                node: None if node in ahead else "" if node in asserted else self._reason(node)
                for node in gm.graph.nodes
            }
            proposal = propose_partitions(
                gm,
                lambda node, reasons=reasons: reasons[node] is None,  # type: ignore[misc]
                min_nodes=self.min_nodes,
            )
            # Values with other readers are computed outside: repeat the selection.
            kept = read_by_one(list(ahead), proposal.partitions, stretches)
            if len(kept) == len(ahead):
                break
            lost = {*ahead} - {*kept}
            calls = [node for node in calls if node not in lost]
        for node, reason in reasons.items():
            if reason:
                self.report.report_reject(node, reason)
        return proposal, ahead

    def _ahead(self, calls: Sequence[Node], constants: Collection[str]) -> dict[Node, None]:
        """Return undelegated calls that depend on no input, and the calls that they depend on."""
        self.known = constants
        computable = foldable_nodes(calls, constants, in_memory=True)
        needed: set[Node] = set()
        for node in reversed(computable):
            if node in needed or self._reason(node):
                needed.update((node, *node.all_input_nodes))
        needed.update(node for node in computable if is_getitem(node) and node.args[0] in needed)
        return {node: None for node in computable if node in needed}

    def _reason(self, node: Node) -> str | None:
        """Return why a node is not delegated; "" if reports omit it, None if it is delegated."""
        if node.op != "call_function" or is_getitem(node):
            return ""
        return self.objection(node)


def _read_by(nodes: Iterable[Node], ahead: Iterable[Node]) -> list[Node]:
    """Return the calls of ``ahead`` whose results ``nodes`` need, directly or indirectly.

    The proposal may put such a call into an earlier partition than the one that reads it.
    """
    calls, readers = list(ahead), set(nodes)
    for node in reversed(calls):
        if not readers.isdisjoint(node.users):
            readers.add(node)
    return [node for node in calls if node in readers]


def _with_assertions(ahead: Iterable[Node]) -> Iterator[Node]:
    """Yield folded calls, each followed by the assertions about its result."""
    for node in ahead:
        yield node
        yield from (user for user in node.users if user.target is ASSERTION)

"""The OpenVINO backend and its partitioner."""

from __future__ import annotations

import openvino
import torch
from torch.fx import Node

from lowerdeck.lowered_module import CompileSpec, DeclarativePartitioner, operator_name
from lowerdeck.openvino.device import DEVICE, PRECISION, RELEASE
from lowerdeck.openvino.operators import (
    Elementwise,
    Matrices,
    Movement,
    Norms,
    Quantized,
    Reductions,
    Windows,
)
from lowerdeck.torch_base import pytree


class OpenvinoBackend(Elementwise, Matrices, Movement, Norms, Quantized, Reductions, Windows):
    """Compile partitions with OpenVINO, for the runtime's delegate of the same name.

    A payload runs only with the version of OpenVINO that compiled it, which the compile spec
    ``openvino`` names.

    Example:
        >>> import torch
        >>> from lowerdeck.lowered_module import get_lowered_backend_modules, to_backend
        >>> program = torch.export.export(torch.nn.Linear(4, 2), (torch.ones(1, 4),))
        >>> lowered = to_backend(program, OpenvinoPartitioner())
        >>> [one.backend_id for one in get_lowered_backend_modules(lowered.graph_module)]
        ['OpenvinoBackend']
    """


class OpenvinoPartitioner(DeclarativePartitioner):
    """Partitioner for operators that OpenVINO supports.

    Args:
        device: OpenVINO's device for the payloads, such as ``"CPU"`` or ``"GPU.1"``.
        keep_precision: Whether float32 operators compute in float32. If not, the device chooses
            the precision, as with ExecuTorch's backend: CPUs that support bfloat16 use it, which
            is up to twice as fast, with errors of up to 1 % of the largest result.
        dynamic_sizes: Whether to delegate tensors of dynamic sizes. The official runtime up to 1.5
            ignores the actual size of a result and returns all of its memory, so only
            ``lowerdeck.runner`` runs such files correctly.
        min_nodes: Smallest number of nodes in a partition.
    """

    def __init__(
        self,
        *,
        device: str = "CPU",
        keep_precision: bool = True,
        dynamic_sizes: bool = False,
        min_nodes: int = 1,
    ) -> None:
        super().__init__(
            OpenvinoBackend,
            compile_specs=[
                CompileSpec(DEVICE, device.encode()),
                CompileSpec(RELEASE, openvino.__version__.partition("-")[0].encode()),
                *([] if keep_precision else [CompileSpec(PRECISION, b"device")]),
            ],
            min_nodes=min_nodes,
        )
        self.dynamic_sizes = dynamic_sizes

    def objection(self, node: Node) -> str | None:
        """Return the reason why ``node`` is not delegated, or None if OpenVINO computes it.

        Args:
            node: A call in the program or a nested graph.
        """
        for source in node.all_input_nodes:
            if isinstance(source.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
                return f"{source.name} is a computed number, but payloads take only tensors"
        reason = super().objection(node)
        if reason is not None:
            return reason
        if operator_name(node).startswith("aten.conv") and self._is_constant(
            node.all_input_nodes[0]
        ):
            # OpenVINO 2025.4.1 computes matmul(transpose(convolution(constant)), x) wrongly.
            return "OpenVINO folds convolutions of constants wrongly"
        for source in (*node.all_input_nodes, node):
            if source.name not in self.known:
                reason = self._refused_value(source)
                if reason is not None:
                    return reason
        return None

    def _is_constant(self, node: Node) -> bool:
        """Return whether ``node`` depends only on constants."""
        seen, waiting = {node}, [node]
        while waiting:
            current = waiting.pop()
            if current.name in self.known:
                continue
            if current.op != "call_function":
                return False
            new = [source for source in current.all_input_nodes if source not in seen]
            seen.update(new)
            waiting += new
        return True

    def _refused_value(self, node: Node) -> str | None:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.dim() == 0:
                return f"{node.name} has no dimensions, which the official runtime rejects"
            if not self.dynamic_sizes and any(not isinstance(size, int) for size in leaf.shape):
                return (
                    f"shape {tuple(leaf.shape)} is dynamic, but the official runtime ignores "
                    "actual sizes of results; dynamic_sizes=True compiles for lowerdeck.runner"
                )
        return None

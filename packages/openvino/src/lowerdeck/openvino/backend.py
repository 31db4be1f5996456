"""The backend, and the partitioner that chooses for it."""

from __future__ import annotations

import torch
from torch.fx import Node

from lowerdeck.lowered_module import (
    CompileSpec,
    DeclarativePartitioner,
    operator_name,
)
from lowerdeck.openvino.device import DEVICE, PRECISION
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
    """Compiles partitions with OpenVINO, for the runtime's delegate of that name.

    A payload is bound to the version of OpenVINO that made it.

    Example:
        >>> import torch
        >>> from lowerdeck.lowered_module import get_lowered_backend_modules, to_backend
        >>> program = torch.export.export(torch.nn.Linear(4, 2), (torch.ones(1, 4),))
        >>> lowered = to_backend(program, OpenvinoPartitioner())
        >>> [one.backend_id for one in get_lowered_backend_modules(lowered.graph_module)]
        ['OpenvinoBackend']
    """


class OpenvinoPartitioner(DeclarativePartitioner):
    """Gives OpenVINO all that it computes as torch does.

    Args:
        device: Which of OpenVINO's devices runs the payloads, such as ``"CPU"`` or ``"GPU.1"``.
        keep_precision: Whether float32 is computed in float32. If not, the device chooses, as with
            ExecuTorch's own backend: a processor with bfloat16 takes that, which is up to twice
            as fast, with errors of up to a hundredth of the largest result.
        dynamic_sizes: Whether to take tensors whose sizes are known at run time alone. The
            official runtime up to 1.5 does not report the size of a result to the program, and
            gives all of its memory instead: only ``lowerdeck.runner`` runs such files rightly.
        min_nodes: Partitions with fewer nodes are left to the program.
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
                *([] if keep_precision else [CompileSpec(PRECISION, b"device")]),
            ],
            min_nodes=min_nodes,
        )
        self.dynamic_sizes = dynamic_sizes

    def objection(self, node: Node) -> str | None:
        """Return why ``node`` is left to the program, or None if OpenVINO takes it.

        Args:
            node: A call in the program, or in a nested graph.
        """
        for source in node.all_input_nodes:
            if isinstance(source.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
                return f"{source.name} is computed at run time, and payloads take tensors alone"
        reason = super().objection(node)
        if reason is not None:
            return reason
        if operator_name(node).startswith("aten.conv") and self._is_constant(
            node.all_input_nodes[0]
        ):
            # 2025.4.1: convolution(constant), transposed, times a matrix, is off by any amount.
            return "OpenVINO folds convolutions of constants wrongly"
        for source in (*node.all_input_nodes, node):
            if source.name not in self.known:
                reason = self._refused_value(source)
                if reason is not None:
                    return reason
        return None

    def _is_constant(self, node: Node) -> bool:
        """Return whether ``node`` is computed of constants alone."""
        seen, waiting = {node}, [node]
        while waiting:
            node_ = waiting.pop()
            if node_.name in self.known:
                continue
            if node_.op != "call_function":
                return False
            new = [source for source in node_.all_input_nodes if source not in seen]
            seen.update(new)
            waiting += new
        return True

    def _refused_value(self, node: Node) -> str | None:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.dim() == 0:
                return f"{node.name} has no dimensions, which the official runtime refuses"
            if not self.dynamic_sizes and any(not isinstance(size, int) for size in leaf.shape):
                return (
                    f"size {tuple(leaf.shape)} is dynamic, of which the official runtime does "
                    "not report to the program; dynamic_sizes=True compiles it for this runner"
                )
        return None

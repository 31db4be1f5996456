"""``XnnpackQuantizer``: annotate models for PT2E quantisation with XNNPACK.

This module needs torchao (``pip install lowerdeck-xnnpack[quantize]``); ``lowerdeck.xnnpack`` is
imported without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule, Node

if TYPE_CHECKING:

    class Quantizer:
        """Untyped alias of torchao's quantiser base class."""
else:
    try:
        from torchao.quantization.pt2e.quantizer import Quantizer
    except ModuleNotFoundError as _error:
        raise ModuleNotFoundError(
            "lowerdeck.xnnpack.quantizer needs torchao: pip install 'torchao>=0.18'",
            name=_error.name,
        ) from _error

from lowerdeck.xnnpack.errors import XnnpackError
from lowerdeck.xnnpack.quantize.annotate import annotate_arithmetic, annotate_layers, share_scales
from lowerdeck.xnnpack.quantize.specs import specs_for

__all__ = ["XnnpackQuantizer"]

_WITH_SCALARS = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)


class XnnpackQuantizer(Quantizer):
    """Annotate models for PT2E quantisation, as ExecuTorch's ``XNNPACKQuantizer`` does.

    Annotations equal those of ExecuTorch 1.4.1 with ``set_global``, with these fixes:

    - Dynamic: 1-D convolutions, and convolutions before a relu, are quantised; ExecuTorch leaves
      them in float.
    - All layers that share weights are quantised, not only the first.
    - An in-place relu keeps the scale of its input, like an out-of-place one.
    - A number added to or multiplied with an integer tensor does not become a float tensor, which
      would promote the result; concatenated integer tensors are not observed, which would fail.
    - A functional adaptive average pool is quantised too.
    - Constants with infinities, such as masks, stay in float whatever their size.

    Args:
        per_channel: Whether weights have per-channel scales, which are more accurate and equally
            fast.
        dynamic: Whether activations are quantised at run time, without calibration; linear layers
            and convolutions only.
        qat: Whether the program is trained further (``prepare_qat_pt2e``).
        weight_bits: 8, or 4 for linear layers.
        accepts: Returns whether a node may be quantised; by default all may.

    Raises:
        XnnpackError: ``weight_bits`` is neither 8 nor 4.

    Example:
        >>> import torch
        >>> from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        >>> inputs = (torch.randn(1, 8),)
        >>> exported = torch.export.export(torch.nn.Linear(8, 4).eval(), inputs)
        >>> prepared = prepare_pt2e(exported.module(), XnnpackQuantizer())
        >>> prepared(*inputs).shape  # calibrate, with representative inputs
        torch.Size([1, 4])
        >>> program = torch.export.export(convert_pt2e(prepared), inputs)
    """

    def __init__(
        self,
        *,
        per_channel: bool = True,
        dynamic: bool = False,
        qat: bool = False,
        weight_bits: int = 8,
        accepts: Callable[[Node], bool] | None = None,
    ) -> None:
        super().__init__()
        if weight_bits not in (4, 8):
            raise XnnpackError(f"found weights of {weight_bits} bits, expected 4 or 8")
        self._specs = specs_for(
            per_channel=per_channel, dynamic=dynamic, qat=qat, weight_bits=weight_bits
        )
        self._accepts: Callable[[Node], bool] = accepts or (lambda _: True)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Convert number operands of additions and multiplications to tensors, in place.

        Args:
            model: The module to quantise.

        Returns:
            The same module.
        """
        for node in list(model.graph.nodes):
            value = node.meta.get("val")
            if node.op != "call_function" or node.target not in _WITH_SCALARS:
                continue
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                node.args = tuple(
                    argument if isinstance(argument, Node) else _tensor_of(argument, model, node)
                    for argument in node.args
                )
        model.recompile()
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate the nodes, in place.

        Args:
            model: The module to quantise.

        Returns:
            The same module.
        """
        annotate_layers(model, self._specs, self._accepts)
        if not self._specs.dynamic:
            annotate_arithmetic(model, self._specs, self._accepts)
            share_scales(model, self._specs, self._accepts)
        return model

    def validate(self, model: GraphModule) -> None:
        """Accept every annotation."""


def _tensor_of(number: object, model: GraphModule, user: Node) -> Node:
    """Return a node that reads a number stored as a buffer of the model."""
    position = 0
    while hasattr(model, f"_tensor_constant_{position}"):
        position += 1
    name = f"_tensor_constant_{position}"
    tensor = torch.tensor(float(number))  # type: ignore[arg-type]  # add and mul take numbers
    model.register_buffer(name, tensor)
    with model.graph.inserting_before(user):
        node = model.graph.get_attr(name)
    node.meta["val"] = user.meta["val"].fake_mode.from_tensor(tensor, static_shapes=True)
    return node

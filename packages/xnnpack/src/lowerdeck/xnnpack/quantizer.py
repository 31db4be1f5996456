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
        """Untyped base class of torchao's quantisers."""
else:
    try:
        from torchao.quantization.pt2e.quantizer import Quantizer
    except ModuleNotFoundError as _error:
        raise ModuleNotFoundError(
            "lowerdeck.xnnpack.quantizer needs torchao: pip install lowerdeck-xnnpack[quantize]",
            name=_error.name,
        ) from _error

from lowerdeck.xnnpack.errors import XnnpackError
from lowerdeck.xnnpack.quantize.annotate import (
    annotate_arithmetic,
    annotate_layers,
    share_scales,
)
from lowerdeck.xnnpack.quantize.specs import specs_for

__all__ = ["XnnpackQuantizer"]

_WITH_SCALARS = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)


class XnnpackQuantizer(Quantizer):
    """Annotate models for PT2E quantisation, as ExecuTorch's ``XNNPACKQuantizer`` does.

    Its annotations are those of ExecuTorch 1.4.1 with ``set_global``, except where these are slow
    or wrong:

    - Dynamic: a convolution before a relu is quantised too. ExecuTorch leaves it in float, and
    with it most of an image network. - Dynamic: a one-dimensional convolution is quantised too. -
    A three-dimensional convolution stays in float: XNNPACK has none. - Layers that share their
    weights are all quantised; ExecuTorch quantises the first. - An in-place relu keeps the scales
    of its input, like one that is not in place. - A number that is added to, or multiplied with,
    integers does not become a float tensor, which would make the results floats; concatenated
    integer tensors are not observed, which would fail. - An adaptive average pool is quantised as
    a function too, not only as a module. - Constants that contain infinities, such as masks, stay
    in float, whatever their size.

    Args:
        per_channel: Whether each channel of a weight has its own scale, which is more accurate and
            equally fast.
        dynamic: Whether activations are quantised at run time, row by row: no calibration, linear
            layers and convolutions only.
        qat: Whether the program is trained further (``prepare_qat_pt2e``).
        weight_bits: 8, or 4 for linear layers.
        accepts: Whether a node may be quantised; by default every node may.

    Raises:
        XnnpackError: Another number of bits.

    Example:
        >>> import torch
        >>> from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        >>> inputs = (torch.randn(1, 8),)
        >>> exported = torch.export.export(torch.nn.Linear(8, 4).eval(), inputs)
        >>> prepared = prepare_pt2e(exported.module(), XnnpackQuantizer())
        >>> prepared(*inputs).shape  # calibrate: with many inputs, as they will come
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
        """Turn numbers that are added or multiplied into tensors, which have scales, in place.

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
        """Accept every annotation: all can be compiled."""


def _tensor_of(number: object, model: GraphModule, user: Node) -> Node:
    """Return a node that reads a number as a constant of the model."""
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

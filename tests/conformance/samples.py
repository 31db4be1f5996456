"""torch's own operator samples (OpInfo), each as a module whose tensors are inputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

DTYPES = (torch.float32, torch.int64)
ALL_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
PER_OPERATOR = 4

# Values that differ from run to run cannot be compared.
_RANDOM = (
    "bernoulli",
    "cauchy",
    "dropout",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "normal",
    "rand",
    "rrelu",
    "uniform",
    "empty",
    "new_empty",
    "fractional_max_pool",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of an operator: a module without weights, and its tensors."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]


class Call(nn.Module):
    """Calls ``function``; a leaf that is ``TENSOR`` is the next tensor that it is given."""

    def __init__(self, function: Any, spec: pytree.TreeSpec, leaves: list[Any]) -> None:
        super().__init__()
        self.function, self.spec, self.leaves = function, spec, leaves

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return what the function returns."""
        given = iter(tensors)
        leaves = [next(given) if leaf is TENSOR else leaf for leaf in self.leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(first, *args, **kwargs)


TENSOR = object()


def operators(
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Iterator[tuple[str, Any, torch.dtype]]:
    """Yield a name, the OpInfo and the dtype of everything that can be compared."""
    for info in op_db:
        if any(part in info.name for part in _RANDOM):
            continue
        for dtype in dtypes:
            if dtype in info.supported_dtypes("cpu"):
                variant = f".{info.variant_test_name}" if info.variant_test_name else ""
                kind = str(dtype).removeprefix("torch.")
                yield f"{info.name}{variant}-{kind}", info, dtype


def samples(info: Any, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield the first few samples of an operator."""
    found = 0
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in info.sample_inputs("cpu", dtype, requires_grad=False):
            leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            given = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
            tensors = tuple(contiguous(t) if t.layout is torch.strided else t for t in given)
            rest = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            yield Sample(Call(info.get_op(), spec, rest), tensors)
            found += 1
            if found == PER_OPERATOR:
                return


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The binding of the runtime asks it of strides even where there is no element."""
    return tensor.clone(memory_format=torch.contiguous_format)

"""Pass: select the kernel of every call, and report missing ones early."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from lowerdeck.emitter.errors import MissingKernel, MissingKernelError
from lowerdeck.emitter.ir.assertions import is_assertion
from lowerdeck.emitter.ir.graph import Call, Kernel, Method, all_blocks, values_in
from lowerdeck.emitter.ir.kernel_lookup import find_kernel
from lowerdeck.emitter.ir.kernels import OFFICIAL_KERNELS, KernelTable
from lowerdeck.emitter.ir.values import TensorValue
from lowerdeck.torch_base import OpOverload, source_frame

_SHOWN = 5


def select_kernels(method: Method, table: KernelTable) -> None:
    """Set the kernel of every call that needs one.

    Requires:
        No assertions; layouts and operands suit the kernels.

    Ensures:
        Every call has a kernel of the table, or is a view that shares the memory of its base.

    Raises:
        MissingKernelError: A call has no kernel; the error names all of them.
    """
    missing: dict[str, tuple[str, list[str]]] = {}
    for block in all_blocks(method.block):
        for operation in block.body:
            if not isinstance(operation, Call) or needs_no_kernel(operation):
                continue
            kernel, reason = find_kernel(operation.target, table)
            if kernel is not None and (limit := _beyond_kernel(operation, kernel, table)):
                kernel, reason = None, limit
            operation.kernel = kernel
            if kernel is None:
                entry = missing.setdefault(str(operation.target), (reason, []))
                entry[1].append(source_of(operation.origin))
    _refuse_missing(missing, table)


def require_kernels(module: fx.GraphModule, table: KernelTable) -> None:
    """Check that every operator of a graph has a kernel.

    Args:
        module: A decomposed program, with its branches and loops.

    Raises:
        MissingKernelError: An operator has none; the error names all of them.
    """
    missing: dict[str, tuple[str, list[str]]] = {}
    for submodule in module.modules():
        for node in submodule.graph.nodes if isinstance(submodule, fx.GraphModule) else ():
            if not isinstance(node.target, OpOverload) or is_assertion(node.target):
                continue
            kernel, reason = find_kernel(node.target, table)
            if kernel is None:
                missing.setdefault(str(node.target), (reason, []))[1].append(source_of(node))
    _refuse_missing(missing, table)


def _refuse_missing(missing: dict[str, tuple[str, list[str]]], table: KernelTable) -> None:
    if missing:
        raise MissingKernelError(
            [
                MissingKernel(name, reason, _some(sources))
                for name, (reason, sources) in missing.items()
            ],
            table.version,
        )


def _beyond_kernel(call: Call, kernel: Kernel, table: KernelTable) -> str:
    """Return why the kernel does not support ``call``, or ""."""
    if call.op_name == "convolution" and call.args[0].rank not in (3, 4):
        return f"the kernel takes 3 or 4 dimensions, this convolution has {call.args[0].rank}"
    if call.op_name == "max_pool2d_with_indices_backward":
        return "the kernel computes wrong gradients; export the model for inference"
    if call.op_name == "_fft_r2c" and not call.args[3]:
        return "the kernel computes only the one-sided transform"
    official = kernel.full_name in OFFICIAL_KERNELS
    takes_complex = kernel.name.partition("::")[2] in table.complex_numbers
    dtypes = list(_dtypes(call)) if official else []
    if not takes_complex and any(dtype.is_complex for dtype in dtypes):
        return "the kernel does not support complex dtypes"
    if any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in dtypes):
        return "the kernel does not support float8 dtypes"
    if call.op_name in ("as_strided", "as_strided_copy") and (why := _as_strided_conflict(call)):
        return why
    if call.op_name in ("unfold", "unfold_copy") and call.args[0].rank == 0:
        return "the kernel aborts for a tensor without dimensions"
    return ""


def _as_strided_conflict(call: Call) -> str:
    """Return why ``as_strided`` selects other elements in a program than in eager, or ""."""
    source = call.origin.args[0] if call.origin is not None else None
    traced = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(traced, torch.Tensor):
        return ""
    if call.args[0].dynamic or not traced.is_contiguous() or traced.storage_offset():
        return (
            "its argument has dynamic sizes, or in eager other strides or another offset than in "
            f"a program ({tuple(traced.stride())} and {traced.storage_offset()} in eager); use "
            "slices or an index"
        )
    _, size, stride, offset = call.args[:4]
    fixed = (*size, *stride, offset or 0)
    if not all(isinstance(number, int) for number in fixed):
        return "it supports only static sizes and strides"
    last = (offset or 0) + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= traced.numel():
        return "it reads past its argument's elements; take the whole tensor as its argument"
    return ""


def _dtypes(call: Call) -> Iterator[torch.dtype]:
    for value in (*values_in(call.args), *call.outs):
        if isinstance(value, TensorValue):
            yield value.dtype


def needs_no_kernel(call: Call) -> bool:
    """Return whether all results of ``call`` are views in planned memory."""
    outs = call.outs
    if isinstance(call.target, Kernel) or not outs:
        return False
    return all(isinstance(out, TensorValue) and out.base is not None for out in outs)


def source_of(node: fx.Node | None) -> str:
    """Return the name of a node and the line of the user's code that created it."""
    if node is None:
        return "the emitter"
    frame = source_frame(node)
    return f"{node.name} ({frame.location})" if frame else node.name


def _some(sources: list[str]) -> tuple[str, ...]:
    if len(sources) <= _SHOWN:
        return tuple(sources)
    return (*sources[:_SHOWN], f"and {len(sources) - _SHOWN} more")

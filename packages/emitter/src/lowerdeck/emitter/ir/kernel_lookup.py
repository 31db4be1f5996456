"""Find the runtime's kernel for an operator."""

from __future__ import annotations

from lowerdeck.emitter.ir.graph import Kernel
from lowerdeck.emitter.ir.kernels import KernelTable
from lowerdeck.emitter.ir.overloads import out_variant
from lowerdeck.emitter.ir.runtime_ops import SCALAR_KERNELS
from lowerdeck.torch_base import OpOverload, schema_of

# These kernels return a number and have no output tensor.
_NO_OUT_VARIANT = frozenset({"aten::sym_size.int", "aten::sym_numel", "aten::_local_scalar_dense"})


def find_kernel(target: object, table: KernelTable) -> tuple[Kernel | None, str]:
    """Return the kernel for an operator, or None and the reason why there is none.

    Args:
        target: An ``OpOverload``, a Python function such as ``operator.add``, or a ``Kernel``.
    """
    if isinstance(target, Kernel):
        return (target, "") if target.full_name in table else (None, "no such kernel")
    if not isinstance(target, OpOverload):
        kernel = SCALAR_KERNELS.get(target)  # type: ignore[call-overload]
        return kernel, "the runtime has no kernel for this function on numbers"
    schema = schema_of(target)
    own = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    if own in _NO_OUT_VARIANT or (not schema.returns and own in table):
        return Kernel(schema.name, schema.overload_name), ""
    variant = out_variant(target)
    if variant is None:
        return None, _why_no_variant(str(schema.name))
    if variant.full_name not in table:
        return None, f"no kernel {variant.full_name}"
    return Kernel(variant.name, variant.overload, variant.list_out), ""


def _why_no_variant(name: str) -> str:
    if not name.startswith("aten::"):
        return (
            f"the operator has no out-variant; register one ({name}.out) with torch.library, and "
            "name it in custom_kernels of the config"
        )
    return "the operator has no out-variant"

"""Find the out-variant and the runtime's kernel of an operator."""

from __future__ import annotations

from dataclasses import dataclass

from lowerdeck.emitter._torch_private import operator_schemas
from lowerdeck.emitter.ir.graph import VIEWS, Kernel
from lowerdeck.emitter.ir.kernels import KernelTable
from lowerdeck.emitter.ir.runtime_ops import SCALAR_KERNELS
from lowerdeck.torch_base import OpOverload, schema_of

_FACTORY = ("dtype", "layout", "device", "pin_memory")

# View operators: a program copies, or shares memory if that is equivalent.
_VIEWS_NAMES = """
    alias as_strided detach diagonal expand permute select slice split split_with_sizes
    squeeze t transpose unbind unfold unsqueeze view view_as_real
"""
_VIEWS = frozenset(_VIEWS_NAMES.split())


@dataclass(frozen=True, slots=True)
class OutVariant(Kernel):
    """The overload of an operator that writes into given tensors.

    Attributes:
        kept: Positions in the functional schema of the out-variant's inputs.
    """

    kept: tuple[int, ...] = ()


def copying_name(name: str) -> str:
    """Return the name of a view operator's copying variant; other names unchanged.

    Args:
        name: Operator with namespace, such as ``"aten::permute"``.
    """
    space, _, short = name.partition("::")
    if space != "aten":
        return name
    if short in VIEWS:
        return f"{space}::view_copy"
    return f"{name}_copy" if short in _VIEWS else name


_OUT_VARIANTS: dict[OpOverload, OutVariant] = {}


def out_variant(target: OpOverload) -> OutVariant | None:
    """Return the out-variant of a functional operator, or None if there is none.

    Args:
        target: The functional overload; for a view operator the copying one is looked up.
    """
    variant = _OUT_VARIANTS.get(target) or _find_out_variant(target)
    # A missing variant is not cached: it may be registered later.
    if variant is not None:
        _OUT_VARIANTS[target] = variant
    return variant


def _find_out_variant(target: OpOverload) -> OutVariant | None:
    schema = schema_of(target)
    arguments = list(enumerate(schema.arguments))
    if {*_FACTORY} <= {argument.name for _, argument in arguments}:
        arguments = [(i, a) for i, a in arguments if a.name not in _FACTORY]
    expected = [(argument.name, str(argument.type)) for _, argument in arguments]
    name = copying_name(schema.name)
    if name.endswith("::view_copy") and expected:
        expected = [(("size" if n == "shape" else n), kind) for n, kind in expected]
    for candidate in operator_schemas(name):
        outs = [argument for argument in candidate.arguments if argument.is_out]
        if not outs:
            continue
        inputs = [(a.name, str(a.type)) for a in candidate.arguments if not a.is_out]
        if inputs == expected:
            list_out = str(outs[0].type) == "List[Tensor]"
            return OutVariant(
                name, candidate.overload_name, list_out, tuple(i for i, _ in arguments)
            )
    return None


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

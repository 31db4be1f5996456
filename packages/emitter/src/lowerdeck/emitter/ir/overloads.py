"""Find the out-variant of an operator by comparing schemas."""

from __future__ import annotations

from dataclasses import dataclass

from lowerdeck.emitter._torch_private import operator_schemas
from lowerdeck.emitter.ir.graph import VIEWS, Kernel
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

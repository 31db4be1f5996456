"""Serialize the pytree specs of inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable

from lowerdeck.serializer import ContainerMetadata
from lowerdeck.torch_base import pytree


def container_metadata(
    in_spec: pytree.TreeSpec | None, out_spec: pytree.TreeSpec | None
) -> ContainerMetadata:
    """Return the pytree specs of a method in the file format.

    Args:
        in_spec: Spec of ``(args, kwargs)``, or None when unknown.
        out_spec: Spec of the outputs, or None when unknown.
    """
    return ContainerMetadata(_text(in_spec), _text(out_spec))


def _text(spec: pytree.TreeSpec | None) -> str:
    if spec is None:
        return ""
    # torch registers names for its result classes, such as torch.return_types.topk, only from 2.14
    # on; the file must not depend on the version.
    plain = _with_tuples(spec, lambda kind: kind.__module__ == "torch.return_types")
    try:
        return pytree.treespec_dumps(plain)
    except NotImplementedError:
        # A class without a registered name.
        return pytree.treespec_dumps(
            _with_tuples(plain, lambda kind: kind not in (tuple, list, dict))
        )


def _with_tuples(spec: pytree.TreeSpec, replaced: Callable[[type], bool]) -> pytree.TreeSpec:
    """Return ``spec`` with nodes of the classes that ``replaced`` selects replaced by tuples."""
    if spec.is_leaf():
        return spec
    children = [_with_tuples(child, replaced) for child in spec.children()]
    kind: type | None = spec.type
    if kind is None or not replaced(kind):
        return pytree.TreeSpec(spec.type, spec.context, children)
    return pytree.treespec_tuple(children)

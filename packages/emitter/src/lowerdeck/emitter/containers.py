"""The shapes of nested inputs and outputs, as text that travels with the program."""

from __future__ import annotations

from torch.utils._pytree import TreeSpec, treespec_tuple

from lowerdeck.emitter._torch_private import dump_tree_spec, spec_kind
from lowerdeck.serializer import ContainerMetadata


def container_metadata(in_spec: TreeSpec | None, out_spec: TreeSpec | None) -> ContainerMetadata:
    """Return the pytree specs of a method as the format holds them.

    Args:
        in_spec: Spec of ``(args, kwargs)``, or None when unknown.
        out_spec: Spec of the outputs, or None when unknown.
    """
    return ContainerMetadata(_text(in_spec), _text(out_spec))


def _text(spec: TreeSpec | None) -> str:
    if spec is None:
        return ""
    try:
        return dump_tree_spec(spec)
    except NotImplementedError:
        # A class without a registered name, such as torch.return_types.topk: a tuple in the text.
        return dump_tree_spec(_with_tuples(spec))


def _with_tuples(spec: TreeSpec) -> TreeSpec:
    """Return ``spec`` with every node that has no text form turned into a tuple."""
    if spec.is_leaf():
        return spec
    children = [_with_tuples(child) for child in spec.children()]
    if spec_kind(spec) in (tuple, list, dict):
        return TreeSpec(spec.type, spec.context, children)
    return treespec_tuple(children)

"""Use partitioners and backends of this package inside ExecuTorch's own lowering."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule

from lowerdeck.lowered_module._executorch import backend_base, edge_operator
from lowerdeck.lowered_module.authoring.backend import CompileSpec, with_plain_bytes
from lowerdeck.lowered_module.program.graphs import nodes_of

OURS = "lowerdeck"
"""Key of the compile spec that tells our partitions from those of ExecuTorch's backend of the same
name: both are looked up by the name that the file will have."""
_classes: dict[str, type] = {}


@contextmanager
def in_torchs_operators(program: ExportedProgram) -> Iterator[bool]:
    """Temporarily replace operators of ExecuTorch's Edge dialect by torch's.

    Args:
        program: Any program; its operators are restored afterwards.

    Yields:
        Whether it is of that dialect.
    """
    changed = to_torchs_operators(program.graph_module)
    try:
        yield bool(changed)
    finally:
        for node, target in changed:
            node.target = target


def to_torchs_operators(graph_module: GraphModule) -> list[tuple[Any, Any]]:
    """Replace operators of ExecuTorch's Edge dialect by torch's.

    Args:
        graph_module: The module, with the graphs of its control flow.

    Returns:
        The changed nodes, with their former operators.
    """
    changed = []
    for node in nodes_of(graph_module):
        operator = edge_operator(node.target) if node.op == "call_function" else None
        if operator is not None:
            changed.append((node, node.target))
            node.target = operator
    return changed


def offer_to_peer(name: str, backend: Any) -> None:
    """Register a backend of this package with ExecuTorch's lowering.

    ExecuTorch uses the last class of a name. A proxy for ours is created again if it is not the
    last; it passes partitions that are not ours to the previous class of the name.
    """
    base = backend_base()
    if base is None:
        return
    same = [cls for cls in base.__subclasses__() if cls.__name__ == name]
    if not same or same[-1] is not _classes.get(name):
        others = [cls for cls in same if not is_offered(cls)]
        _classes[name] = _offered(name, base, backend, others[-1] if others else None)


def _offered(name: str, base: Any, backend: Any, other: Any) -> type:
    def preprocess(edge_program: ExportedProgram, compile_specs: list[Any]) -> Any:
        plain = [spec for spec in compile_specs if spec.key != OURS]
        if len(plain) == len(compile_specs) and other is not None:
            return other.preprocess(edge_program, compile_specs)
        to_torchs_operators(edge_program.graph_module)
        return with_plain_bytes(backend.preprocess(edge_program, plain))

    def preprocess_multimethod(
        cls: Any,
        edge_programs: Mapping[str, Sequence[ExportedProgram]],
        compile_specs: Mapping[str, Sequence[list[Any]]],
    ) -> Any:
        every = [specs for parts in compile_specs.values() for specs in parts]
        if other is not None and not any(spec.key == OURS for specs in every for spec in specs):
            return other.preprocess_multimethod(edge_programs, compile_specs)
        return base.preprocess_multimethod.__func__(cls, edge_programs, compile_specs)

    members = {
        "preprocess": staticmethod(preprocess),
        "preprocess_multimethod": classmethod(preprocess_multimethod),
        "__module__": __name__,
    }
    return type(name, (base,), members)


def is_offered(cls: type) -> bool:
    """Return whether a class is a proxy for one of this package in ExecuTorch's list."""
    return cls.__module__ == __name__


def marked(specs: Sequence[Any]) -> list[Any]:
    """Return compile specs that mark a partition as ours."""
    return [*specs, CompileSpec(OURS, b"")]

"""The code of a generated module: its graph, source, signature and recorded calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Proxy

from lowerdeck.torch_base import pytree
from lowerdeck.unflatten.attributes import ADAPTER
from lowerdeck.unflatten.call_signature import CallSignature
from lowerdeck.unflatten.codegen.source import Source, write_source
from lowerdeck.unflatten.contract import RecordedCall, check, raise_for_argument
from lowerdeck.unflatten.modules.pickling import (
    record_graph,
    record_module,
    restore_graph,
    restore_module,
)
from lowerdeck.unflatten.root_checks import RootGuards
from lowerdeck.unflatten.specializations import Function, Site


@dataclass(slots=True)
class Body:
    """One specialization of a generated module.

    Attributes:
        name: Canonical name of the module.
        built: The graph, or a function that builds it.
        signature: Structure of arguments and result; None where both are flat.
        attributes: Graph modules for operators such as ``cond``.
        type_name: Qualified name of the eager module's type.
        source: The source generated last.
        calls: The recorded calls of this specialization.
        sites: The calls of each child, in all specializations.
        others: The further specializations of the module.
        refusal: Reason why the module cannot be replaced or hooked, or "".
        is_part: It is a part of a call that other modules interrupt.
        is_moved: The module was moved to another floating-point dtype.
        guards: Size conditions of the whole program, for the outermost module.
        shadowed: Our attribute names that the model gave to a child or to state.
        eager_type: The eager class that the module also is an instance of.
        view: The graph as a ``torch.fx.GraphModule``, once it was read.
    """

    name: str
    built: Graph | Callable[[], Graph]
    signature: CallSignature | None = None
    attributes: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    type_name: str | None = None
    source: Source | None = None
    calls: list[RecordedCall] = field(default_factory=list)
    sites: dict[str, Site] = field(default_factory=dict)
    others: Sequence[Body] = ()
    refusal: str = ""
    is_part: bool = False
    is_moved: bool = False
    guards: RootGuards | None = None
    shadowed: tuple[str, ...] = ()
    eager_type: type[torch.nn.Module] | None = None
    view: Any = None

    @property
    def specializations(self) -> tuple[Body, ...]:
        """This specialization and the further ones."""
        return (self, *self.others)

    @property
    def is_dispatched(self) -> bool:
        """Whether callers select a specialization or pass values besides the arguments."""
        return bool(self.others) or (self.signature is not None and self.signature.has_extras)

    @property
    def graph(self) -> Graph:
        """The graph, built at the first access."""
        if not isinstance(self.built, Graph):
            self.built = self.built()
        return self.built

    def write(self) -> Source:
        """Return the source of the graph as it is now."""
        self.source = write_source(
            self.graph, self.signature, self.attributes, is_checked=True, is_root=not self.name
        )
        return self.source

    def latest(self) -> Source:
        """Return the source generated last."""
        return self.source or self.write()

    def compile(self) -> list[Function]:
        """Return the functions of all specializations, generated again."""
        functions: list[Any] = [body.write().compile() for body in self.specializations]
        if self.signature is not None and self.signature.variadic:
            functions[0].__signature__ = self.signature.python_signature()
        return functions

    def text(self) -> str:
        """Return the source of all specializations."""
        first, *others = (body.latest().text for body in self.specializations)
        renamed = (
            text.replace("def forward(", f"def forward_{number}(", 1)
            for number, text in enumerate(others, start=1)
        )
        return "\n".join((first, *renamed))

    def check_arguments(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments of a call; return them, in the exported structure if adapted.

        Raises:
            InputConstraintError: They match no recorded call.
            InputStructureError: Their structure differs.
        """
        signature = self.signature
        leaves = list(args) if signature is None else signature.flatten(module, args, kwargs)
        for leaf in leaves:
            if isinstance(leaf, Proxy):
                # Otherwise a symbolic trace runs writes of buffers once, and does not record them.
                leaf.tracer.proxy_buffer_attributes = True
        mismatch = check(self.calls, leaves, any_float=self.is_moved)
        if mismatch is not None:
            if signature is None:
                labels = [f"value {number}" for number in range(len(leaves))]
            else:
                adapter = module.__dict__[ADAPTER] if signature.adapts else None
                labels = adapter.get_flat_arg_paths() if adapter is not None else []
                if len(labels) != len(leaves):
                    labels = signature.leaf_labels(leaves)
            raise_for_argument(mismatch, labels, self.type_name or "this module")
        if self.guards is not None and not torch.compiler.is_exporting():
            self.guards.check(leaves)
        if signature is not None and signature.adapts:
            args, kwargs = pytree.tree_unflatten(leaves, signature.in_spec)
        return args, kwargs

    def __deepcopy__(self, memo: dict[int, Any]) -> Body:
        """Return a body with its own graphs."""
        others = [copy.deepcopy(other, memo) for other in self.others]
        built = copy.deepcopy(self.built, memo) if isinstance(self.built, Graph) else self.built
        return replace(self, built=built, others=others, view=None)

    def __reduce__(self) -> tuple[Any, ...]:
        graph = record_graph(self.built if isinstance(self.built, Graph) else self.built())
        attributes = {name: record_module(held) for name, held in self.attributes.items()}
        options = {
            name: getattr(self, name)
            for name in (
                *("signature", "type_name", "calls", "sites", "others", "refusal", "is_part"),
                *("is_moved", "guards", "shadowed", "eager_type"),
            )
        }
        return _restore_body, (self.name, graph, attributes, options)


def _restore_body(
    name: str, graph: Any, attributes: Mapping[str, Any], options: Mapping[str, Any]
) -> Body:
    modules = {path: restore_module(held) for path, held in attributes.items()}
    return Body(name, restore_graph(graph), attributes=modules, **options)

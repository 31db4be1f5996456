"""A module that runs the Python code generated from its graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.fx import Graph

from lowerdeck.unflatten.code import Source, write_source
from lowerdeck.unflatten.graph_record import GraphRecord, record_graph
from lowerdeck.unflatten.signature import CallSignature

PRIVATE = "_lowerdeck"
"""The one attribute that generated modules have beside those of ``torch.nn.Module``."""


@dataclass(slots=True)
class Body:
    """What a generated module runs.

    Attributes:
        graph: The graph; children, parameters and buffers are read from the module.
        signature: Structure of arguments and result; None where both are flat.
        attributes: Graph modules that operators such as ``cond`` take.
        type_name: Qualified name of the eager module's type.
        source: What was generated from the graph last.
    """

    graph: Graph
    signature: CallSignature | None = None
    attributes: dict[str, torch.nn.Module] = field(default_factory=dict)
    type_name: str | None = None
    source: Source | None = None

    def write(self) -> Source:
        """Return the source of the graph as it is now, and remember it."""
        self.source = write_source(self.graph, self.signature, self.attributes)
        return self.source


class GeneratedModule(torch.nn.Module):
    """Base of the modules that ``unflatten`` makes.

    Each has a class of its own (shared by modules of equal code) that carries its ``forward``.
    """

    _lowerdeck_generated = True

    def __init__(self, body: Body, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.__dict__[PRIVATE] = body
        if forward is None:
            self.recompile()
        else:
            self.__class__ = class_with(_plain_class(type(self)), forward)

    @property
    def graph(self) -> Graph:
        """The graph of this module; call ``recompile`` after editing it."""
        graph: Graph = self.__dict__[PRIVATE].graph
        return graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        self.__dict__[PRIVATE].graph = graph
        self.recompile()

    @property
    def code(self) -> str:
        """The Python source of ``forward``, with the model's own lines as comments."""
        source: Source = self.__dict__[PRIVATE].source
        return source.text

    def recompile(self) -> None:
        """Generate ``forward`` again after the graph was edited."""
        body: Body = self.__dict__[PRIVATE]
        self.__class__ = class_with(_plain_class(type(self)), body.write().compile())

    def finalize(self) -> None:
        """Generate ``forward`` again: torch's name for ``recompile``."""
        self.recompile()

    def type_name(self) -> str | None:
        """Return the qualified name of the eager module's type, or None if it is not known."""
        name: str | None = self.__dict__[PRIVATE].type_name
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = object.__new__(type(self))
        memo[id(self)] = made
        state = dict(self.__dict__)
        body: Body = state.pop(PRIVATE)
        made.__dict__[PRIVATE] = Body(
            copy.deepcopy(body.graph, memo),
            body.signature,
            body.attributes,
            body.type_name,
            body.source,
        )
        made.__dict__.update(copy.deepcopy(state, memo))
        return made

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        body: Body = state.pop(PRIVATE)
        record = record_graph(body.graph)
        parts = (record, body.signature, body.attributes, body.type_name)
        return _restore_class, (_plain_class(type(self)),), (parts, state)

    def __setstate__(self, state: Any) -> None:
        parts, attributes = state
        record, signature, modules, type_name = parts
        body = Body(_graph(record), signature, modules, type_name)
        self.__dict__.update(attributes)
        self.__dict__[PRIVATE] = body
        self.recompile()


def class_with(base: type, forward: Callable[..., Any]) -> type:
    """Return a subclass of ``base`` whose ``forward`` is the given function."""
    namespace = {
        "forward": forward,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        _MARK: True,
    }
    return type(base.__name__, (base,), namespace)


_MARK = "_lowerdeck_generated_class"


def _plain_class(cls: type) -> type:
    while _MARK in vars(cls):
        cls = cls.__bases__[0]
    return cls


def _restore_class(cls: type[GeneratedModule]) -> GeneratedModule:
    return cls.__new__(cls)


def _graph(record: GraphRecord) -> Graph:
    return record.graph()

"""The templates of one program, traced on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import Node

from lowerdeck.decompose._torch_private import (
    FakeTensors,
    as_current_node,
    overriding,
    own_rule,
    record,
    replace_view,
    tracing_settings,
)
from lowerdeck.decompose.cache import DecompositionCache, context
from lowerdeck.decompose.calls.keys import Call, fill, is_autocast
from lowerdeck.decompose.calls.template import Template, parent_of
from lowerdeck.decompose.recording import Recording
from lowerdeck.decompose.rules import Rules
from lowerdeck.decompose.untraced import record_untraced
from lowerdeck.torch_base import pytree

Contexts = Sequence[Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True, slots=True)
class ViewInverse:
    """The inverse of a view: a function of the viewed tensor and the new elements of the view.

    Attributes:
        view: The operator of the view.
        index: Which of several results; None if there is one.
    """

    view: Any
    index: int | None

    def __call__(self, whole: Any, new: Any, args: Any, kwargs: Any) -> Any:
        """Return ``whole`` with the view of it replaced.

        Args:
            whole: The viewed functional tensor.
            new: The new elements of the view.
            args: Arguments of the view, after the first.
            kwargs: Keyword arguments of the view.
        """
        seen = self.view(whole, *args, **kwargs)
        replace_view(seen if self.index is None else seen[self.index], new)
        return whole


class Templates:
    """Decompositions of distinct calls.

    Args:
        fakes: Creates the inputs of traces.
        cache: Shares templates with other programs.

    Attributes:
        writes: Whether the program writes in place, so that views need an inverse.
    """

    def __init__(self, rules: Rules, fakes: FakeTensors, cache: DecompositionCache) -> None:
        self.rules = rules
        self.traces: int = 0
        self.reused: int = 0
        self.fakes = fakes
        self.writes: bool = False
        self._shared = cache
        self._context: Any = None
        self._own: dict[Any, Template] = {}
        self._settings = ExitStack()

    def __enter__(self) -> Templates:
        """Return itself, with the settings of torch that tracing needs."""
        self._context = context(self.rules, self.writes)
        self._settings.enter_context(tracing_settings())
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the settings of torch."""
        self._settings.close()

    def find(self, call: Call, contexts: Contexts = (), source: Node | None = None) -> Template:
        """Return the template of a call, traced if it is the first of its kind.

        Args:
            call: A call with its key.
            contexts: Functions that create the contexts around it.
            source: The original node of this call, for rules that read its result.

        Raises:
            WholeProgramError: It cannot be decomposed alone.
        """
        return (
            self._look_up(call)
            # What a context changes is known only from a trace.
            or (None if contexts else self._untraced(call))
            or self._trace(call, contexts, source)
        )

    def _look_up(self, call: Call) -> Template | None:
        # The program's own table comes first: with symbols it cannot be shared.
        template = self._own.get(call.key)
        if template is None and call.is_static:
            template = self._shared.get((call.key, self._context))
            if template is not None:
                self._own[call.key] = template
        self.reused += template is not None
        return template

    def _untraced(self, call: Call) -> Template | None:
        recording = record_untraced(call, self.rules, self.fakes)
        if recording is None:
            return None
        return self._keep(call, Template.of(recording, call.key[0]))

    def _keep(self, call: Call, template: Template) -> Template:
        self._own[call.key] = template
        # Symbols belong to the ShapeEnv of one program.
        if call.is_static and template.is_static:
            self._shared.put((call.key, self._context), template)
        return template

    def _trace(self, call: Call, contexts: Contexts, source: Node | None) -> Template:
        if not self.traces:
            # Only now: overriding takes longer than a program whose templates are cached.
            self._settings.enter_context(overriding(self.rules.composites))
        self.traces += 1
        if source is not None and self.rules.by_result:
            contexts = (*contexts, partial(as_current_node, source))
        target: Any = call.key[0]
        leaves = call.fake_inputs(self.fakes)

        def run(*inputs: Any) -> Any:
            return target(*fill(call.args, inputs), **fill(call.kwargs, inputs))

        def traced(rules: Mapping[Any, Callable[..., Any]]) -> Recording:
            return record(run, leaves, self.fakes.mode, rules, call.differentiable, contexts)

        # An overridden composite is decomposed below autocast, which would not cast its parts.
        has_rule = target in self.rules.composites or is_autocast(call.key[-1])
        with overriding({} if has_rule else own_rule(target)):
            recording = traced(self.rules.others)
            # The inverse of a view is that of its operator, not of the decomposition.
            shows = self.writes and (recording.shared or _gives_views(recording))
            template = Template.of(recording, target, traced({}) if shows else None)
        return self._keep(call, template)


def _gives_views(recording: Recording) -> bool:
    """Return whether a result is a view of an input or of an intermediate tensor."""
    leaves = pytree.tree_leaves(recording.result)
    return any(isinstance(leaf, Node) and parent_of(leaf) is not None for leaf in leaves)

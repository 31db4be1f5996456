"""Templates of one program, traced on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import Node

from lowerdeck.decompose._torch_private import (
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
from lowerdeck.torch_base import FakeTensorMode, pytree

Contexts = Sequence[Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True, slots=True)
class ViewInverse:
    """Inverse of a view: a function of the base tensor and the view's new elements.

    Attributes:
        view: Operator of the view.
        index: Index of the result of a multi-output op, else None.
    """

    view: Any
    index: int | None

    def __call__(self, base: Any, new: Any, args: Any, kwargs: Any) -> Any:
        """Return ``base`` with the elements of the view replaced.

        Args:
            base: The functional base tensor.
            new: New elements of the view.
            args: Arguments of the view after the base.
        """
        result = self.view(base, *args, **kwargs)
        replace_view(result if self.index is None else result[self.index], new)
        return base


class Templates:
    """Decompositions of distinct calls.

    Args:
        mode: Fake mode of trace inputs.
        ranges: The program's ``range_constraints``, which rules may read. None if templates with
            symbols are not shared with other lowerings of the program.

    Attributes:
        traces: Number of traced calls so far.
        reused: Number of calls so far that had a template.
        writes: Whether the program mutates memory, so that views need inverses.
    """

    def __init__(
        self, rules: Rules, mode: FakeTensorMode, cache: DecompositionCache, ranges: Any = None
    ) -> None:
        self.rules = rules
        self.traces: int = 0
        self.reused: int = 0
        self.mode = mode
        self.writes: bool = False
        self._shared = cache
        self._context: Any = None
        self._ranges = ranges
        self._own: dict[Any, Template] = {}
        self._dynamic: dict[Any, Template] = {}
        self._settings = ExitStack()

    def __enter__(self) -> Templates:
        """Apply torch settings for tracing; return self."""
        self._context = context(self.rules, self.writes)
        if self._ranges:
            key = (self._context, frozenset(self._ranges.items()))
            # Their symbols refer to the mode, so that a weak dictionary would keep both.
            of_mode = vars(self.mode).setdefault("_lowerdeck_templates", {})
            self._dynamic = of_mode.setdefault(key, {})
        self._settings.enter_context(tracing_settings())
        return self

    def __exit__(self, *_: object) -> None:
        """Restore torch settings."""
        self._settings.close()

    def find(
        self,
        call: Call,
        contexts: Contexts = (),
        source: Node | None = None,
        recorded: Any = None,
    ) -> Template:
        """Return the template of a call; traced if it is neither cached nor known without a trace.

        Args:
            contexts: Factories of the contexts around the call.
            source: Original node of the call, for rules that read its result.
            recorded: Fake result of the call, if known.

        Raises:
            WholeProgramError: The call cannot be decomposed separately.
        """
        return (
            self._look_up(call)
            # Contexts such as autocast require a trace.
            or (None if contexts else self._untraced(call, recorded))
            or self._trace(call, contexts, source)
        )

    def _look_up(self, call: Call) -> Template | None:
        template = self._own.get(call.key) or self._dynamic.get(call.key)
        if template is None and call.is_static:
            template = self._shared.get((call.key, self._context))
            if template is not None:
                self._own[call.key] = template
        self.reused += template is not None
        return template

    def _untraced(self, call: Call, recorded: Any) -> Template | None:
        recording = record_untraced(call, self.rules, self.mode, recorded)
        if recording is None:
            return None
        return self._keep(call, Template.of(recording, call.key[0]))

    def _keep(self, call: Call, template: Template) -> Template:
        self._own[call.key] = template
        if call.is_static and template.is_static:
            self._shared.put((call.key, self._context), template)
        else:
            self._dynamic[call.key] = template
        return template

    def _trace(self, call: Call, contexts: Contexts, source: Node | None) -> Template:
        if not self.traces:
            # Lazily: overriding takes longer than decomposing a program with cached templates.
            self._settings.enter_context(overriding(self.rules.composites))
        self.traces += 1
        if source is not None and self.rules.by_result:
            contexts = (*contexts, partial(as_current_node, source))
        target: Any = call.key[0]
        leaves = call.fake_inputs(self.mode)

        def run(*inputs: Any) -> Any:
            return target(*fill(call.args, inputs), **fill(call.kwargs, inputs))

        def traced(rules: Mapping[Any, Callable[..., Any]]) -> Recording:
            return record(run, leaves, self.mode, rules, call.differentiable, contexts)

        # Overridden composites are decomposed below autocast, which does not apply inside them.
        has_rule = target in self.rules.composites or is_autocast(call.key[-1])
        with overriding({} if has_rule else own_rule(target)):
            recording = traced(self.rules.others)
            # A view is inverted by its operator, not by its decomposition.
            needs_inverse = self.writes and (recording.shared or _returns_views(recording))
            template = Template.of(recording, target, traced({}) if needs_inverse else None)
        return self._keep(call, template)


def _returns_views(recording: Recording) -> bool:
    """Return whether a result is a view of an input or of an intermediate tensor."""
    leaves = pytree.tree_leaves(recording.result)
    return any(isinstance(leaf, Node) and parent_of(leaf) is not None for leaf in leaves)

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
    overriding,
    own_rule,
    record,
    replace_view,
    tracing_settings,
)
from lowerdeck.decompose.cache import DecompositionCache, context
from lowerdeck.decompose.calls.agreement import (
    check_results,
    describe_rule,
    with_checked_counts,
)
from lowerdeck.decompose.calls.facts import TensorFacts
from lowerdeck.decompose.calls.keys import Call, fill, is_autocast
from lowerdeck.decompose.calls.symbols import bind
from lowerdeck.decompose.calls.template import Template, parent_of
from lowerdeck.decompose.errors import DecomposeError, TemplateError, WholeProgramError
from lowerdeck.decompose.recording import Recording
from lowerdeck.decompose.rules import Rules
from lowerdeck.decompose.untraced import Resized, record_unchanged
from lowerdeck.torch_base import OpOverload, describe_node, pytree

Contexts = Sequence[Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True, slots=True)
class ViewInverse:
    """The inverse of a view: from the whole as it was, and the view as it is, the whole as it is.

    It takes both, and then the arguments of the view that come after what is viewed.

    Attributes:
        view: The operator of the view.
        index: Which of several results; None where there is one.
    """

    view: Any
    index: int | None

    def __call__(self, whole: Any, new: Any, args: Any, kwargs: Any) -> Any:
        """Return ``whole`` with the view of it replaced.

        Args:
            whole: A functional tensor.
            new: What the view of it is to be.
            args: The arguments of the view, after the first.
            kwargs: Its keywords.
        """
        seen = self.view(whole, *args, **kwargs)
        replace_view(seen if self.index is None else seen[self.index], new)
        return whole


class Templates:
    """What distinct calls become.

    Args:
        rules: How operators are decomposed.
        fakes: Creates the tensors that calls are traced with.
        cache: Where templates outlive the program.
        writes: Whether the program writes in place, so that it matters how a view is inverse_view.
    """

    def __init__(
        self,
        rules: Rules,
        fakes: FakeTensors,
        cache: DecompositionCache,
        *,
        writes: bool,
    ) -> None:
        self.rules = rules
        self._others = with_checked_counts(rules.others)
        self._composites = with_checked_counts(rules.composites)
        self.traces: int = 0
        self.reused: int = 0
        self._fakes = fakes
        self.writes: bool = writes
        self._shared = cache
        self._context = context(rules, writes)
        self._own: dict[Any, Template] = {}
        self._resized = Resized(rules, fakes)
        self._settings = ExitStack()
        self._open = ExitStack()
        self._is_open: bool = False

    def __enter__(self) -> Templates:
        """Return itself; what tracing changes is changed from the first trace to the exit."""
        self._settings.enter_context(tracing_settings())
        return self

    def __exit__(self, *_: object) -> None:
        """Let torch be as it was."""
        self._open.close()
        self._settings.close()

    def find(
        self,
        call: Call,
        contexts: Contexts = (),
        source: Node | None = None,
        *,
        is_plain: bool = False,
    ) -> Template:
        """Return the template of a call, traced if it is the first of its kind.

        Args:
            call: The call; what it calls is the first of its key.
            contexts: What makes the contexts that it runs in.
            source: The node that it stands for, where it is the call of that: sizes that are
                known only at run time go by its symbols, and then it is one of its kind.
            is_plain: Whether it is in no context that may change what it becomes.

        Raises:
            WholeProgramError: It has none.
        """
        # Each such call binds symbols of its own, so that no other call can share its template.
        if source is not None and "unbacked_bindings" in source.meta:
            return self._trace(call, call.key, contexts, source=source)
        found = (
            self._look_up(call, call.key)
            or (self._untraced(call) if is_plain else None)
            or self._trace(call, call.key, contexts, source=source, is_plain=is_plain)
        )
        # ``as_strided`` counts from the start of the storage, which keys leave out otherwise.
        if found.by_offset and call.offsets:
            key = (call.key, call.offsets)
            found = self._look_up(call, key) or self._trace(
                call, key, contexts, with_offset=True, source=source
            )
        return found

    def _look_up(self, call: Call, key: Any) -> Template | None:
        found = self._own.get(key)
        if found is None and call.is_static:
            found = self._shared.get((key, self._context))
            if found is not None:
                self._own[key] = found
        self.reused += found is not None
        return found

    def _untraced(self, call: Call) -> Template | None:
        recording = record_unchanged(call, self._rules_of(call), self._fakes)
        if recording is not None:
            return self._keep(call, call.key, Template.of(recording, call.key[0]))
        found = self._resized.find(call)
        self.reused += found is not None
        return None if found is None else self._keep(call, call.key, found)

    def _rules_of(self, call: Call) -> Rules:
        return self.rules.keeping(call.key[0]) if call.stays else self.rules

    def _keep(self, call: Call, key: Any, made: Template) -> Template:
        self._own[key] = made
        # Symbols belong to one program's ShapeEnv.
        if call.is_static and made.is_static:
            self._shared.put((key, self._context), made)
        return made

    def _trace(
        self,
        call: Call,
        key: Any,
        contexts: Contexts,
        *,
        with_offset: bool = False,
        source: Node | None = None,
        is_plain: bool = False,
    ) -> Template:
        target: Any = call.key[0]
        given = [
            facts.input_fake(self._fakes, with_offset=with_offset)
            if isinstance(facts, TensorFacts)
            else facts
            for facts in call.facts
        ]

        def run(*inputs: Any) -> Any:
            return target(*fill(call.args, inputs), **fill(call.kwargs, inputs))

        rules = self._rules_of(call)
        rule = rules.others.get(target, rules.composites.get(target))
        self.traces += 1
        if is_autocast(call.key[-1]) and not isinstance(target, (OpOverload, ViewInverse)):
            # The parts of a composite: what stays whole among them would hide theirs again.
            self._open.close()
            self._is_open = False
        elif not self._is_open:
            self._open.enter_context(overriding(self._composites))
            self._is_open = True
        try:
            made, bound = self._record(rules, run, given, call, contexts, source)
        except DecomposeError:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            called = (
                f"a write through {target.view}" if isinstance(target, ViewInverse) else target
            )
            described = called if source is None else describe_node(source)
            cure = ""
            if isinstance(target, OpOverload) and not rules.keeps(target):
                by = "" if rule is None else f" than {describe_rule(rule)}"
                cure = f"; keep it whole, or give a table with another rule for it{by}"
            raise TemplateError(
                f"{described} cannot be traced by itself: {type(error).__name__}: {reason}{cure}"
            ) from error
        if rule is not None and source is not None:
            check_results(source, call, made, rule)
        if bound:
            # Its sizes are those of this call alone.
            return made
        # Convolutions and norms of other sizes need no trace of their own.
        if is_plain:
            self._resized.learn(call, made)
        return self._keep(call, key, made)

    def _record(
        self,
        rules: Rules,
        run: Callable[..., Any],
        given: Any,
        call: Call,
        contexts: Contexts,
        source: Node | None,
    ) -> tuple[Template, bool]:
        """Return a template, and whether it holds symbols that came up while it was traced."""
        target: Any = call.key[0]
        whole = None
        bound = partial(bind, self._fakes.mode, source)
        others = {op: self._others[op] for op in rules.others} if call.stays else self._others
        with overriding(self._own_rule(call, rules)):
            recording = record(
                run, given, self._fakes.mode, others, call.differentiable, contexts, bound
            )
            if recording.unbacked and source is None:
                raise WholeProgramError(f"{target} makes sizes that are known only at run time")
            # Views are inverted as whole operators, not as what these are decomposed into.
            if self.writes and (recording.shared or _gives_views(recording)):
                mode = self._fakes.mode
                whole = record(run, given, mode, {}, call.differentiable, contexts, bound)
        return Template.of(recording, target, whole), recording.unbacked

    def _own_rule(self, call: Call, rules: Rules) -> Mapping[Any, Callable[..., Any]]:
        """Return how the operator of a call is decomposed, beyond the rules for all calls."""
        target = call.key[0]
        if call.stays and target in rules.composites:
            return {target: rules.composites[target]}
        # Below autograd is below autocast, too, which would not cast the parts.
        has_rule = target in rules.composites or is_autocast(call.key[-1])
        return {} if has_rule else own_rule(target)


def _gives_views(recording: Recording) -> bool:
    """Return whether a result is a view, of what is given or of what was made."""
    leaves = pytree.tree_leaves(recording.result)
    return any(isinstance(leaf, Node) and parent_of(leaf) is not None for leaf in leaves)

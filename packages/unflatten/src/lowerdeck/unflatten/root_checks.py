"""Size conditions of the whole program: the guards that ``program.module()`` runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node, Proxy

from lowerdeck.torch_base import size_conditions, varies
from lowerdeck.unflatten._torch_private import guard_function, size_guards
from lowerdeck.unflatten.call_signature import CallSignature
from lowerdeck.unflatten.errors import InputConstraintError, UnsupportedProgramError

_INPUT = re.compile(r"L\['flat_args'\]\[(\d+)\]")


class RootGuards:
    """Guards on the sizes of a program's inputs.

    Args:
        placeholders: Placeholder of each user input.
        ranges: Range of each symbol.
        conditions: Conditions that export recorded, as Python.
        signature: Structure of the arguments.
    """

    def __init__(
        self,
        placeholders: Sequence[Node],
        ranges: Any,
        conditions: Sequence[str],
        signature: CallSignature,
    ) -> None:
        examples = [node.meta.get("val") for node in placeholders]
        self.labels: list[str] = signature.leaf_labels(examples)
        names = [re.sub(r"^([^\[]+)", r"['\1']", label) for label in self.labels]
        # Names of no argument, as error messages quote them.
        unique = [f"_input_{number}_" for number in range(len(names))]
        texts = []
        for condition in conditions:
            text = _INPUT.sub(lambda match: f"L[{unique[int(match[1])]!r}]", condition)
            for name, other in sorted(zip(names, unique, strict=True), key=lambda x: -len(x[0])):
                text = text.replace(f"L{name}", f"L[{other!r}]")
                # Strict export names the arguments of *args so.
                base = re.fullmatch(r"\['(.+)_(\d+)'\](.*)", name)
                if base is not None:
                    part = f"L['{base[1]}'][{base[2]}]{base[3]}"
                    text = text.replace(part, f"L[{other!r}]")
            texts.append(text)
        self._names = unique
        self._guards = [*size_guards(placeholders, ranges, unique), *texts]
        # Read now, so that a damaged file is refused early.
        self._function: Callable[..., None] | None = guard_function(self._guards, unique)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_function": None}

    def check(self, leaves: Sequence[Any]) -> None:
        """Check the sizes of the flat inputs.

        Raises:
            InputConstraintError: The program was not exported for them.
        """
        if any(isinstance(leaf, Proxy) for leaf in leaves):
            return
        if self._function is None:
            self._function = guard_function(self._guards, self._names)
        try:
            self._function(*leaves)
        except AssertionError as error:
            message = str(error)
            for name, label in zip(self._names, self.labels, strict=True):
                message = message.replace(name, label)
            raise InputConstraintError(
                f"{message}. The program was exported for sizes that meet this condition: pass "
                "such sizes, or export again with these. check_input_constraints = False skips "
                "this check."
            ) from None


def root_guards(
    program: ExportedProgram, placeholders: Sequence[Node], signature: CallSignature
) -> RootGuards | None:
    """Return the guards of a program, or None if its sizes are fixed.

    Raises:
        UnsupportedProgramError: Its conditions are not Python.
    """
    values = [node.meta.get("val") for node in placeholders]
    is_fixed = not any(
        varies(size)
        for value in values
        for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
        if not isinstance(size, (int, float, str, type(None)))
    )
    if is_fixed or any("val" not in node.meta for node in placeholders):
        return None
    try:
        return RootGuards(
            placeholders, program.range_constraints, size_conditions(program), signature
        )
    except (SyntaxError, TypeError, KeyError) as error:
        raise UnsupportedProgramError(
            f"The program's size conditions cannot be read ({error}). Export it again."
        ) from error

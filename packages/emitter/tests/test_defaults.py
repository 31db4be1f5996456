"""What a rule takes where the program says nothing is what the operator's schema says."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowerdeck.emitter.decompositions import table
from lowerdeck.emitter.decompositions.attention import attention
from lowerdeck.emitter.decompositions.complex_numbers import COMPLEX_NUMBERS
from lowerdeck.emitter.decompositions.experts import expert_rules
from lowerdeck.emitter.decompositions.quantization import quantization_rules
from lowerdeck.torch_base import DTYPES, schema_of

_RULES: list[tuple[Any, Callable[..., Any]]] = [
    # Functions of torch itself have no signatures.
    *((target, rule) for target, rule in table._RULES.items() if hasattr(rule, "__code__")),
    *COMPLEX_NUMBERS.items(),
    *quantization_rules().items(),
    *expert_rules().items(),
    (table._ATTENTION, attention),
]


def _schema_argument(target: Any, position: int, parameter: inspect.Parameter) -> Any:
    """Return the argument that a parameter takes: by its name, or else by its position."""
    arguments = schema_of(target).arguments
    # from_ is named so because of Python's keyword.
    found = [one for one in arguments if one.name in (parameter.name, parameter.name.rstrip("_"))]
    if not found and parameter.kind is not parameter.KEYWORD_ONLY:
        found = [one for one in arguments[position : position + 1] if not one.kwarg_only]
    return found[0] if found else None


def _plain(default: Any, argument: Any) -> Any:
    """Return a default as the schema tells it: dtypes are numbers, and 0 is [0, 0, 0]."""
    if isinstance(default, torch.dtype):
        return next(number for number, dtype in DTYPES.items() if dtype == default)
    if isinstance(default, tuple):
        told = argument.default_value if argument is not None else None
        same = isinstance(told, list) and len(set(told)) == 1 and len(default) == 1
        return list(default) * (len(told) if same and told else 1)
    return default


@pytest.mark.parametrize(("target", "rule"), _RULES, ids=lambda one: getattr(one, "__name__", one))
def test_a_default_is_that_of_the_schema(target: Any, rule: Callable[..., Any]) -> None:
    for position, parameter in enumerate(inspect.signature(rule).parameters.values()):
        argument = _schema_argument(target, position, parameter)
        if argument is None or not argument.has_default_value():
            continue
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        assert parameter.default is not parameter.empty, f"{target} is called without {parameter}"
        told = argument.default_value
        # randint says int64, and takes None, which a program may write, for the same.
        if (argument.name, told, parameter.default) == ("dtype", 4, None):
            continue
        assert _plain(parameter.default, argument) == told, f"{target}: {parameter}"


def test_there_is_no_default_that_no_operator_has() -> None:
    taken: dict[tuple[str, str, str], bool] = defaultdict(bool)
    for target, rule in _RULES:
        for position, parameter in enumerate(inspect.signature(rule).parameters.values()):
            if parameter.default is parameter.empty:
                continue
            argument = _schema_argument(target, position, parameter)
            # A form of the operator that lacks the argument takes the rule's own word for it.
            by_schema = argument is None or argument.has_default_value()
            taken[rule.__module__, rule.__qualname__, parameter.name] |= by_schema
    assert not [one for one, is_taken in taken.items() if not is_taken]

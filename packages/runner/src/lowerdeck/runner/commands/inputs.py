"""Inputs of a method from command-line arguments."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch

from lowerdeck.inspect import say
from lowerdeck.runner.errors import InputError
from lowerdeck.runner.values.arena import strides_of
from lowerdeck.serializer import ExecutionPlan, Tensor
from lowerdeck.torch_base import DTYPES

HELP = (
    "one input, in order: zeros, ones or rand (with a shape: ones:2x3), a number, true, false, "
    "or a torch.save file (of a tensor, or a list of all inputs); default: random, dynamic "
    "sizes at their maximum"
)
_FILLS = {"zeros", "ones", "rand"}
_SHAPE = re.compile(r"[0-9]{1,18}(?:x[0-9]{1,18})*")
_MAX_ECHO = 200


def make_inputs(plan: ExecutionPlan, texts: Sequence[str], seed: int) -> list[Any]:
    """Return the inputs of a method.

    Args:
        texts: One argument for each input, or a file with all inputs. Missing tensors are random.
        seed: Seed of random inputs.

    Raises:
        InputError: An argument is not a valid input.
        OSError: A file cannot be read.
    """
    values = [plan.values[index].val for index in plan.inputs]
    if len(texts) == 1 and _is_file(texts[0]):
        loaded = _load(texts[0])
        if isinstance(loaded, (list, tuple)):
            return list(loaded)
    if len(texts) > len(values):
        raise InputError(f"{len(texts)} inputs given; the method takes {len(values)}")
    missing = [n for n, v in enumerate(values) if n >= len(texts) and isinstance(v, Tensor)]
    if texts and missing:
        say(f"no --input for {', '.join(f'input {n}' for n in missing)}: random (seed {seed})")
    generator = torch.Generator().manual_seed(seed % 2**63)
    padded = [*texts, *["rand"] * (len(values) - len(texts))]
    return [_one(value, text, generator) for value, text in zip(values, padded, strict=True)]


def _one(value: object, text: str, generator: torch.Generator) -> Any:
    name = f"--input {text[:_MAX_ECHO]}"
    fill, _, shape = text.partition(":")
    if fill in _FILLS and isinstance(value, Tensor):
        return _filled(value, fill, shape, name, generator)
    if fill in _FILLS:
        # The constant that the program was specialized to.
        return next(iter(astuple(value)), None)  # type: ignore[call-overload]
    if _is_file(text):
        return _load(text)
    try:
        number = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"{name} is neither a file nor a valid value; expected {HELP}", argument=name
        ) from error
    if not isinstance(value, Tensor):
        return number
    dtype = DTYPES[value.scalar_type]
    try:
        return torch.tensor(number, dtype=dtype)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{name} does not fit {dtype}: {error}", argument=name) from error


def _filled(
    value: Tensor, fill: str, shape: str, name: str, generator: torch.Generator
) -> torch.Tensor:
    """Return a filled tensor with the dtype, layout and (by default) maximum shape of a value."""
    if shape and not _SHAPE.fullmatch(shape):
        raise InputError(f"{name}: invalid shape; expected one such as 2x3", argument=name)
    sizes = [int(size) for size in shape.split("x")] if shape else list(value.sizes)
    # Check before allocating.
    if len(sizes) != len(value.sizes) or any(map(int.__gt__, sizes, value.sizes)):
        raise InputError(
            f"{name} has shape {sizes}; expected at most {list(value.sizes)} "
            f"({len(value.sizes)} dimensions)",
            argument=name,
        )
    dtype = DTYPES[value.scalar_type]
    tensor = torch.empty_strided(sizes, strides_of(sizes, value.dim_order), dtype=dtype)
    if fill != "rand":
        return tensor.fill_(fill == "ones")
    random = torch.rand(sizes, generator=generator)
    # Integers are usually indices, for which 0 and 1 are rarely out of range.
    integral = not (dtype.is_floating_point or dtype.is_complex)
    return tensor.copy_(random.round() if integral else random * 2 - 1)


def _is_file(text: str) -> bool:
    # Path.is_file raises for names that are too long.
    return os.path.isfile(text)  # noqa: PTH113


def _load(path: str) -> Any:
    try:
        return torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # torch's message is a number, empty, or a page of advice to trust the file.
        raise InputError(
            f"--input {path} cannot be loaded; expected a torch.save file of a tensor or of "
            "a list of all inputs"
        ) from error

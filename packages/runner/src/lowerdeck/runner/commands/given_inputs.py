"""Inputs of a method from command-line arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lowerdeck.inspect import say
from lowerdeck.runner.errors import InputError
from lowerdeck.runner.values.layout import strides_of
from lowerdeck.serializer import Bool, Double, ExecutionPlan, Int, String, Tensor
from lowerdeck.torch_base import DTYPES

HELP = (
    "one input, in order: zeros, ones or rand (with a shape: ones:2x3), a number, true, false, "
    "or a file that torch.save wrote (a tensor, or a list of all inputs); random without any"
)
_FOREIGN = re.compile(r"Unsupported (?:global: GLOBAL|class) ([\w.]+)")
_FILLS = {"zeros", "ones", "rand"}
_SHAPE = re.compile(r"[0-9]{1,18}(?:x[0-9]{1,18})*")
_INTEGER = re.compile(r"[+-]?[0-9_]+")
_MOST_LETTERS = 200


def make_inputs(
    plan: ExecutionPlan, texts: Sequence[str], seed: int, *, quiet: bool = False
) -> list[Any]:
    """Return the inputs of a method.

    Args:
        plan: The method in the file.
        texts: One argument for each input; missing ones are random, which is printed.
        seed: Seed of the random ones.
        quiet: Print nothing.

    Raises:
        InputError: An argument does not describe an input.
        OSError: A file cannot be read.
    """
    values = [plan.values[index].val for index in plan.inputs]
    files = [text for text in texts if _is_file(text)]
    if len(texts) == 1 and files:
        loaded = load_values(texts[0])
        if isinstance(loaded, (list, tuple)):
            return _all_of(values, loaded, texts[0])
    if len(texts) > len(values):
        raise InputError(f"{len(texts)} inputs are given; the method takes {len(values)}")
    left = [n for n, v in enumerate(values) if n >= len(texts) and isinstance(v, Tensor)]
    if texts and left and not quiet:
        say(f"no --input for {', '.join(f'input {n}' for n in left)}: random (seed {seed})")
    generator = torch.Generator().manual_seed(seed)
    padded = [*texts, *["rand"] * (len(values) - len(texts))]
    return [
        _one(value, text, f"--input {_short(text)}", generator)
        for value, text in zip(values, padded, strict=True)
    ]


def _one(value: object, text: str, name: str, generator: torch.Generator) -> Any:
    fill, _, shape = text.partition(":")
    if not isinstance(value, Tensor):
        return _fixed(value) if fill in _FILLS else _number(text, name)
    if fill in _FILLS:
        return _filled(value, fill, shape, name, generator)
    if _is_file(text):
        return _fitting(value, load_values(text), name)
    dtype = DTYPES[value.scalar_type]
    number = _number(text, name)
    try:
        return torch.tensor(number, dtype=dtype)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{name} does not fit {dtype}: {error}", argument=name) from error


def _fixed(value: object) -> Any:
    match value:
        case Int(number):
            return number
        case Bool(truth):
            return truth
        case Double(real):
            return real
        case String(text):
            return text
        case _:
            return None


def _filled(
    value: Tensor, fill: str, shape: str, name: str, generator: torch.Generator
) -> torch.Tensor:
    """Return a tensor of the file's dtype and layout; its shape is the upper bound by default."""
    if shape and not _SHAPE.fullmatch(shape):
        raise InputError(f"{name}: {_short(shape)!r} is not a shape such as 2x3", argument=name)
    sizes = [int(size) for size in shape.split("x")] if shape else list(value.sizes)
    if len(sizes) != len(value.sizes):
        raise InputError(
            f"{name}: {len(value.sizes)} sizes were expected, at most {list(value.sizes)}",
            argument=name,
        )
    if any(size > most for size, most in zip(sizes, value.sizes, strict=True)):
        raise InputError(
            f"{name} has shape {sizes}; at most {list(value.sizes)} was expected", argument=name
        )
    dtype = DTYPES[value.scalar_type]
    tensor = torch.zeros(sizes, dtype=dtype)
    if fill == "ones":
        tensor.fill_(1)
    elif fill == "rand":
        random = torch.rand(sizes, generator=generator)
        # Integers are usually indices, for which 0 and 1 are rarely out of range.
        integral = not (dtype.is_floating_point or dtype.is_complex)
        tensor.copy_(random.round() if integral else random * 2 - 1)
    dense = torch.empty(0, dtype=dtype).set_(
        torch.empty(tensor.numel(), dtype=dtype).untyped_storage(),
        0,
        tensor.shape,
        strides_of(sizes, value.dim_order),
    )
    return dense.copy_(tensor)


def _is_file(text: str) -> bool:
    """Return whether an argument is the name of a file, also if it is no valid path."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


def _short(text: str) -> str:
    half = _MOST_LETTERS // 2
    return text if len(text) <= _MOST_LETTERS else f"{text[:half]} ... {text[-half:]}"


def _number(text: str, name: str) -> float | int | bool:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            # As a float, an integer with too many digits for Python would be infinite.
            if _INTEGER.fullmatch(text):
                break
    raise InputError(f"{name} is neither a file nor an input: {HELP}", argument=name)


def _all_of(values: Sequence[object], loaded: Sequence[Any], path: str) -> list[Any]:
    """Return all inputs from one file."""
    if len(loaded) != len(values):
        raise InputError(
            f"--input {path} holds {len(loaded)} inputs; the method takes {len(values)}"
        )
    return [
        _fitting(value, item, f"--input {path}: input {number}")
        for number, (value, item) in enumerate(zip(values, loaded, strict=True))
    ]


def _fitting(value: object, loaded: Any, name: str) -> Any:
    """Check that the method takes a file's tensor; the name of the file is known only here."""
    if not isinstance(value, Tensor):
        return loaded
    if not isinstance(loaded, torch.Tensor):
        raise InputError(
            f"{name} holds a {type(loaded).__name__}; a tensor was expected", argument=name
        )
    dtype, most = DTYPES[value.scalar_type], list(value.sizes)
    if loaded.dtype != dtype:
        raise InputError(f"{name} holds {loaded.dtype}; {dtype} was expected", argument=name)
    shape = list(loaded.shape)
    if len(shape) != len(most) or any(a > b for a, b in zip(shape, most, strict=True)):
        raise InputError(f"{name} holds shape {shape}; at most {most} was expected", argument=name)
    return loaded


def load_values(path: str | os.PathLike[str], option: str = "--input") -> Any:
    """Return the contents of a file that ``torch.save`` wrote.

    Args:
        option: The option that names the file, for errors.

    Raises:
        InputError: It contains something else.
        OSError: It cannot be read.
    """
    try:
        return torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # torch's own message is a number, empty, or a page of advice to trust the file.
        foreign = _FOREIGN.search(str(error))
        with Path(path).open("rb") as file:
            start = file.read(8)
        content = f"an object of {foreign[1]}" if foreign else f"{start!r} at its start"
        raise InputError(
            f"{option} {path} holds no tensors: found {'nothing' if not start else content}, "
            "expected what torch.save wrote of a tensor, or of a list of all inputs"
        ) from error

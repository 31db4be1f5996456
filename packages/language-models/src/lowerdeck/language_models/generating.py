"""Greedy generation from a file, in lowerdeck.runner or in the official runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from lowerdeck.language_models import custom_kernels, embeddings
from lowerdeck.language_models.errors import GenerationError
from lowerdeck.runner import (
    LoadedProgram,
    OfficialRuntime,
    OfficialRuntimeError,
    RunnerError,
    load,
)

Step = Callable[[Sequence[int], int], tuple[int, float]]
"""Maps tokens and the position of the first one to the next token and the call's seconds."""

DECODE = "decode"
"""Optional method for exactly one token."""

OURS = "lowerdeck.runner (Python; an emulator, not representative of the runtime's speed)"


class ModelFile(NamedTuple):
    """A language model's file, loaded in lowerdeck.runner.

    Attributes:
        chunk: Largest number of tokens in one call.
        context: Largest number of tokens of a text.
        eos: Tokens that end a text.
    """

    path: Path
    chunk: int
    context: int
    eos: tuple[int, ...]
    program: LoadedProgram


@dataclass(slots=True)
class Timing:
    """Time that generation took.

    Attributes:
        runtime: Name of the runtime.
        prompt_tokens: Number of tokens of the prompt.
        prompt_seconds: Time of the calls that read the prompt.
        tokens: Number of generated tokens after the first.
        seconds: Time of the calls that generated these tokens.
    """

    runtime: str = OURS
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


def open_model(path: Path) -> ModelFile:
    """Load the file of a language model.

    Args:
        path: A ``.pte`` file from ``export_language_model``.

    Raises:
        GenerationError: The file cannot be loaded, or is not a language model.
    """
    custom_kernels.register()
    embeddings.register()
    kernels = custom_kernels.KERNELS | set(embeddings.KERNELS.values())
    try:
        program = load(path, custom_kernels=kernels)
        constants = {
            name: program.run(name)
            for name in ("get_max_seq_len", "get_max_context_len", "get_eos_ids")
            if name in program.methods
        }
    except RunnerError as error:
        raise GenerationError(f"{path} cannot be loaded: {error}") from error
    if "forward" not in program.methods or "get_max_context_len" not in constants:
        raise GenerationError(
            f"{path} has the methods {', '.join(program.methods)}, expected forward, "
            "get_max_context_len and others, as from `lowerdeck lm export`"
        )
    context = int(constants["get_max_context_len"])
    eos = constants.get("get_eos_ids", ())
    eos_tokens = eos if isinstance(eos, list | tuple) else (eos,)
    chunk = int(constants.get("get_max_seq_len", context))
    return ModelFile(path, chunk, context, tuple(map(int, eos_tokens)), program)


def generate(
    model: ModelFile, prompt: Sequence[int], count: int, *, official: bool, timing: Timing
) -> Iterator[int]:
    """Yield the tokens of a model's greedy continuation of a text.

    Args:
        prompt: Tokens of the text to continue.
        count: Largest number of tokens to add; a token that ends the text is not yielded.
        official: Whether to generate in the official runtime, in a separate process.
        timing: Filled with the time that generation took.

    Raises:
        GenerationError: The prompt is empty, prompt and added tokens exceed the context, or the
            official runtime fails.
    """
    if not prompt:
        raise GenerationError("the prompt has no tokens: give a text to continue")
    if len(prompt) + count > model.context:
        raise GenerationError(
            f"the prompt has {len(prompt)} tokens and {count} more are requested, but the "
            f"context is {model.context}: give a shorter prompt, fewer --tokens, or export with "
            "a larger --context"
        )
    arguments = prompt, count, model.chunk, model.eos, timing
    if not official:
        timing.runtime = OURS
        yield from continued(our_step(model.program), *arguments)
        return
    try:
        with OfficialRuntime(extra_kernels=True) as runtime:
            timing.runtime = runtime.name
            methods = [name for name in ("forward", DECODE) if name in model.program.methods]
            runtime.load(model.path, methods=methods)
            yield from continued(official_step(runtime, methods), *arguments)
    except OfficialRuntimeError as error:
        raise GenerationError(
            f"{model.path}: {error}; --runtime lowerdeck runs it in lowerdeck.runner"
        ) from error


def continued(
    step: Step,
    prompt: Sequence[int],
    count: int,
    chunk: int,
    ends: Sequence[int],
    timing: Timing,
) -> Iterator[int]:
    """Yield the generated tokens, running each step with a function.

    Args:
        prompt: Tokens of the text to continue.
        count: Largest number of tokens to add.
        chunk: Largest number of tokens in one call.
        ends: Tokens that end a text.
        timing: Filled with the time that generation took.
    """
    token = 0
    for start in range(0, len(prompt), chunk):
        token, seconds = step(prompt[start : start + chunk], start)
        timing.prompt_seconds += seconds
    timing.prompt_tokens = len(prompt)
    for position in range(len(prompt), len(prompt) + count):
        if token in ends:
            break
        yield token
        if position + 1 < len(prompt) + count:
            token, seconds = step([token], position)
            timing.tokens += 1
            timing.seconds += seconds


def our_step(program: LoadedProgram) -> Step:
    """Return a function that runs a step in lowerdeck.runner."""

    def step(tokens: Sequence[int], position: int) -> tuple[int, float]:
        method = method_for(tokens, program.methods)
        start = time.perf_counter()
        logits = program.run(method, *inputs_of(tokens, position))
        return int(logits[0, -1].argmax()), time.perf_counter() - start

    return step


def official_step(runtime: OfficialRuntime, methods: Collection[str]) -> Step:
    """Return a function that runs a step in the official runtime.

    Args:
        runtime: A runtime that has loaded the model.
    """

    def step(tokens: Sequence[int], position: int) -> tuple[int, float]:
        calls = runtime.run(inputs_of(tokens, position), method_for(tokens, methods))
        return int(calls.outputs[0][0, -1].argmax()), sum(calls.seconds)

    return step


def method_for(tokens: Sequence[int], methods: Collection[str]) -> str:
    """Return the name of the method for this number of tokens."""
    return DECODE if len(tokens) == 1 and DECODE in methods else "forward"


def inputs_of(tokens: Sequence[int], position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of a method.

    Args:
        position: Position of the first token in the text.
    """
    return torch.tensor([list(tokens)]), torch.arange(position, position + len(tokens))

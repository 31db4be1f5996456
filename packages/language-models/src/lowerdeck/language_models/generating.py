"""Greedy text from a file: in our own runner, or in the official runtime where it is installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
"""Takes tokens and the position of the first; returns the next token and the seconds it took."""

DECODE = "decode"
"""The method that takes exactly one token, where a file has one."""

OURS = "lowerdeck.runner (Python; it emulates the runtime, and its speed says nothing)"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What a file says of the model in it.

    Attributes:
        chunk: How many tokens it takes at once at most.
        context: How many tokens a text may have.
        eos: The tokens that end a text.
        program: The file, loaded in our runner.
    """

    path: Path
    chunk: int
    context: int
    eos: tuple[int, ...]
    program: LoadedProgram


@dataclass(slots=True)
class Timing:
    """How long generating took.

    Attributes:
        runtime: Which runtime it was.
        prompt_tokens: How many tokens were read.
        prompt_seconds: Time of the calls that read them.
        tokens: How many tokens came after the first new one.
        seconds: Time of the calls for those.
    """

    runtime: str = OURS
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


def open_model(path: Path) -> ModelFile:
    """Return what a file says of the model in it.

    Args:
        path: A ``.pte`` file that ``export_language_model`` made.

    Raises:
        GenerationError: It cannot be loaded, or is of no language model.
    """
    custom_kernels.register()
    embeddings.register()
    kernels = custom_kernels.KERNELS | set(embeddings.KERNELS.values())
    try:
        program = load(path, custom_kernels=kernels)
        said = {
            name: program.run(name)
            for name in ("get_max_seq_len", "get_max_context_len", "get_eos_ids")
            if name in program.methods
        }
    except RunnerError as error:
        raise GenerationError(f"{path} cannot be loaded: {error}") from error
    if "forward" not in program.methods or "get_max_context_len" not in said:
        raise GenerationError(
            f"{path} has the methods {', '.join(program.methods)}, expected forward, "
            "get_max_context_len and others as `lowerdeck lm export` writes them"
        )
    context = int(said["get_max_context_len"])
    eos = said.get("get_eos_ids", ())
    several = eos if isinstance(eos, list | tuple) else (eos,)
    chunk = int(said.get("get_max_seq_len", context))
    return ModelFile(path, chunk, context, tuple(map(int, several)), program)


def generate(
    model: ModelFile, prompt: Sequence[int], count: int, *, official: bool, timing: Timing
) -> Iterator[int]:
    """Yield the tokens that a model continues a text with, always the likeliest.

    Args:
        prompt: The tokens of the text.
        count: How many to add at most; a token that ends texts is not yielded.
        official: Whether the official runtime generates, in a separate process.
        timing: Where it is written how long it took.

    Raises:
        GenerationError: The text is empty, or longer than the context with what is to be added.
    """
    if not prompt:
        raise GenerationError("the prompt has no tokens: give a text to continue")
    if len(prompt) + count > model.context:
        raise GenerationError(
            f"the prompt has {len(prompt)} tokens and {count} more are asked for, but the file "
            f"holds {model.context}: give a shorter prompt, fewer --tokens, or export with a "
            "larger --context"
        )
    rest = prompt, count, model.chunk, model.eos, timing
    if not official:
        timing.runtime = OURS
        yield from continued(our_step(model.program), *rest)
        return
    try:
        with OfficialRuntime(extra_kernels=True) as runtime:
            timing.runtime = runtime.name
            methods = [name for name in ("forward", DECODE) if name in model.program.methods]
            runtime.load(model.path, methods=methods)
            yield from continued(official_step(runtime, methods), *rest)
    except OfficialRuntimeError as error:
        raise GenerationError(
            f"{model.path}: {error}; --runtime lowerdeck runs it in our runner"
        ) from error


def continued(
    step: Step,
    prompt: Sequence[int],
    count: int,
    chunk: int,
    ends: Sequence[int],
    timing: Timing,
) -> Iterator[int]:
    """Yield the tokens that follow, by any runtime.

    Args:
        prompt: The tokens of the text.
        count: How many to add at most.
        chunk: How many tokens the model takes at once.
        ends: The tokens that end a text.
        timing: Where it is written how long it took.
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
    """Return what runs a model in our runner."""

    def step(tokens: Sequence[int], position: int) -> tuple[int, float]:
        method = method_for(tokens, program.methods)
        start = time.perf_counter()
        logits = program.run(method, *inputs_of(tokens, position))
        return int(logits[0, -1].argmax()), time.perf_counter() - start

    return step


def official_step(runtime: OfficialRuntime, methods: Collection[str]) -> Step:
    """Return what runs a model in the official runtime.

    Args:
        runtime: It has the model loaded.
        methods: The methods of the model.
    """

    def step(tokens: Sequence[int], position: int) -> tuple[int, float]:
        calls = runtime.run(inputs_of(tokens, position), method_for(tokens, methods))
        return int(calls.outputs[0][0, -1].argmax()), sum(calls.seconds)

    return step


def method_for(tokens: Sequence[int], methods: Collection[str]) -> str:
    """Return the method that takes these tokens.

    Args:
        methods: The methods of a file.
    """
    return DECODE if len(tokens) == 1 and DECODE in methods else "forward"


def inputs_of(tokens: Sequence[int], position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a method takes.

    Args:
        position: Where in the text the first stands.
    """
    return torch.tensor([list(tokens)]), torch.arange(position, position + len(tokens))

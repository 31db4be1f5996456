"""Greedy text from a file: in our own runner, or in the official runtime where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lowerdeck.language_models import custom_kernels, embeddings
from lowerdeck.language_models.errors import GenerationError
from lowerdeck.runner import LoadedProgram, RunnerError, load

Step = Callable[[Sequence[int], int], int]
"""Takes tokens and the position of the first; gives the token that follows the last."""

DECODE = "decode"
"""The method that takes exactly one token, where a file has one."""

OURS = "lowerdeck.runner (Python; it emulates the runtime, and its speed says nothing)"

# Without the current folder, which the command `lowerdeck` does not look into either.
_BRIDGE = ("-P", "-m", "lowerdeck.language_models.official")
_TAIL = 1 << 14
"""Bytes at the end of a log in which its last line is looked for."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What a file says of the model in it.

    Attributes:
        path: Where it lies.
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
        prompt_seconds: Wall time from the first of them to the first new one.
        tokens: How many tokens came after the first new one.
        seconds: Wall time for those.
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
        model: The model.
        prompt: The tokens of the text.
        count: How many to add at most; a token that ends texts is not yielded.
        official: Whether the official runtime generates, in a process of its own.
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
    if official:
        yield from _officially(model, prompt, count, timing)
    else:
        timing.runtime = OURS
        yield from continued(
            our_step(model.program), prompt, count, model.chunk, model.eos, timing
        )


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
        step: Runs the model.
        prompt: The tokens of the text.
        count: How many to add at most.
        chunk: How many tokens the model takes at once.
        ends: The tokens that end a text.
        timing: Where it is written how long it took.
    """
    began = time.perf_counter()
    token = 0
    for start in range(0, len(prompt), chunk):
        token = step(prompt[start : start + chunk], start)
    timing.prompt_tokens, timing.prompt_seconds = len(prompt), time.perf_counter() - began
    began = time.perf_counter()
    for position in range(len(prompt), len(prompt) + count):
        if token in ends:
            break
        yield token
        if position + 1 < len(prompt) + count:
            token = step([token], position)
            timing.tokens += 1
            timing.seconds = time.perf_counter() - began


def our_step(program: LoadedProgram) -> Step:
    """Return what runs a model in our runner.

    Args:
        program: The model.
    """

    def step(tokens: Sequence[int], position: int) -> int:
        method = method_for(tokens, program.methods)
        logits = program.run(method, *inputs_of(tokens, position))
        return int(logits[0, -1].argmax())

    return step


def method_for(tokens: Sequence[int], methods: Collection[str]) -> str:
    """Return the method that takes these tokens.

    Args:
        tokens: Some tokens.
        methods: The methods of a file.
    """
    return DECODE if len(tokens) == 1 and DECODE in methods else "forward"


def inputs_of(tokens: Sequence[int], position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a method takes.

    Args:
        tokens: Some tokens.
        position: Where in the text the first stands.
    """
    return torch.tensor([list(tokens)]), torch.arange(position, position + len(tokens))


def _officially(
    model: ModelFile, prompt: Sequence[int], count: int, timing: Timing
) -> Iterator[int]:
    # In a process of its own: that runtime ends the process over a file that it cannot run.
    asked: dict[str, Any] = {
        "path": str(model.path),
        "prompt": list(prompt),
        "count": count,
        "chunk": model.chunk,
        "ends": list(model.eos),
        "methods": [name for name in ("forward", DECODE) if name in model.program.methods],
    }
    # What it logs goes to a file: a pipe that nobody reads is full after 64 KB, and it would wait.
    # What it is asked does, too: an argument has 128 KB at most.
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as question:
        question.write(json.dumps(asked).encode())
        question.seek(0)
        yield from _told(question, log, model.path, timing)


def _told(question: BinaryIO, log: BinaryIO, path: Path, timing: Timing) -> Iterator[int]:
    command = [sys.executable, *_BRIDGE]
    with subprocess.Popen(
        command, stdin=question, stdout=subprocess.PIPE, stderr=log, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said = json.loads(line)
                if isinstance(said, int):
                    yield said
                    continue
                for name, value in said.items():
                    setattr(timing, name, value)
        except BaseException:
            # Whoever wants no more tokens does not wait for those that are left.
            process.kill()
            raise
    if process.returncode:
        raise GenerationError(
            f"the official runtime ended with {process.returncode} over {path}: "
            f"{_last_line(log)}; --runtime lowerdeck runs it in our runner"
        )


def _last_line(log: BinaryIO) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"

"""Compare the tokens that a file generates with those of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowerdeck.language_models.decoder import CachedDecoder
from lowerdeck.language_models.errors import GenerationError
from lowerdeck.language_models.generating import ModelFile, inputs_of, method_for

TOKENS = 16  # generated for the comparison
_MARGIN = 10.0
"""A differing token is wrong if the model's two highest logits differ by more than this many
times the error.
"""
_MOST = 0.1
"""Largest difference that is attributed to rounding, relative to the largest logit."""


def check_prompt(prompt: Sequence[int], context: int) -> None:
    """Check that a prompt can be compared.

    Args:
        context: Largest number of tokens of a text.

    Raises:
        GenerationError: The prompt is empty, or too long.
    """
    if not prompt:
        raise GenerationError("the prompt of --check has no tokens: give a text to continue")
    if len(prompt) + TOKENS > context:
        raise GenerationError(
            f"the prompt of --check has {len(prompt)} tokens and the check adds {TOKENS}, but "
            f"the context is {context}: give a shorter prompt or a larger --context"
        )


def check_lines(
    decoder: CachedDecoder, model: ModelFile, prompt: Sequence[int]
) -> tuple[bool, list[str]]:
    """Return whether the file generates the model's tokens, and the lines of a report.

    The file and the model both read the prompt and the model's continuation of it. The model reads
    the whole text at each step, without a cache, to detect errors of the file's cache. Where the
    model's two highest logits differ by at most ten times the error, another token is accepted.

    Args:
        decoder: The model with the exported weights.
        prompt: The tokens of a text.

    Raises:
        GenerationError: The text is empty, or too long.
    """
    check_prompt(prompt, model.context)
    expected, results = [], []
    text, generated = list(prompt), list(prompt)
    for _ in range(TOKENS):
        with torch.no_grad():
            eager = decoder.without_cache(torch.tensor([text]))[0, -1]
        for start in range(0, len(generated), model.chunk):
            inputs = inputs_of(
                generated[start : start + model.chunk], len(text) - len(generated) + start
            )
            method = method_for(inputs[0][0].tolist(), model.program.methods)
            ours = model.program.run(method, *inputs)[0, -1]
        expected.append(eager.float().clone())
        results.append(ours.float().clone())
        generated = [int(eager.argmax())]
        text += generated
    reference, other = torch.stack(expected), torch.stack(results)
    error = float((reference - other).abs().max())
    margins = reference.topk(2).values.diff().abs().squeeze(1)
    differs = reference.argmax(-1) != other.argmax(-1)
    wrong = int((differs & (margins > _MARGIN * error)).sum())
    same = TOKENS - int(differs.sum())
    largest = float(reference.abs().max())
    lines = [
        f"check          {same} of {TOKENS} tokens match the model's, logits differ by at most "
        f"{error:.3g} of {largest:.3g}"
    ]
    if wrong:
        lines.append(
            f"check failed   {wrong} tokens differ although the model's two most likely logits "
            f"differ by more than {_MARGIN:.0f} times the error"
        )
    # Negated, because comparisons with NaN are false.
    elif not error <= _MOST * largest:
        lines.append(f"check failed   logits differ by more than {_MOST:.0%} of the largest logit")
    return len(lines) == 1, lines

"""The cases that all judges look at: small models of this package, and some of the zoo."""

from __future__ import annotations

from typing import Any

from lowerdeck_zoo import program
from unflatten_zoo.case import MORE_WAYS, WAYS, Case, Inputs, Named, of_program  # type: ignore[import-not-found]
from unflatten_zoo.models import calls, containers, layers, modes, sizes, state, structures, writes  # type: ignore[import-not-found]

_OF_ZOO = (
    *("resnet", "unet", "vit", "lraspp", "retinanet", "vae", "diffusion_step"),
    *("small_decoder", "inverted", "shuffle", "squeeze_excite", "mixer", "gated"),
    *("two_inputs", "conv_tasnet", "emformer", "tacotron", "gpt_tied", "llama_like"),
    *("two_towers", "experts_hidden", "translator", "cells", "graph_conv", "graph_attention"),
    *("recommender", "dynamic_mlp", "dynamic_image", "dynamic_gpt", "cond", "float16"),
    *("channels_last_inside", "autocast_off", "autocast_on_and_off", "int8_weights_with_lora"),
    *("streaming_filter", "speculative_cache", "kv_cache", "autocast_bfloat16"),
)
# Torch loads no region of autocast and forgets a no_grad next to one; what is computed there is no
# argument outside of it.
_AUTOCAST = "saved, preserving saved, alone, threads, gradients"
_FACTS: dict[str, dict[str, Any]] = {
    "cells": {"marked": ("lstm",)},
    "channels_last_inside": {"without": "files"},
    "cond": {"marked": ("yes", "no"), "without": "threads"},
    **{name: {"without": "threads"} for name in ("streaming_filter", "speculative_cache")},
    "kv_cache": {"without": "threads"},
    **{f"autocast_{name}": {"without": _AUTOCAST} for name in ("off", "on_and_off", "bfloat16")},
}

OWN_CASES: tuple[Case, ...] = (
    *(*layers.CASES, *structures.CASES, *containers.CASES, *state.CASES, *writes.CASES),
    *(*calls.CASES, *modes.CASES, *sizes.CASES),
)
"""The cases of this package's own models."""

CASES = (*OWN_CASES, *(of_program(program(name), **_FACTS.get(name, {})) for name in _OF_ZOO))
"""All cases, in a fixed order."""


def ways(*names: str) -> list[tuple[Case, str]]:
    """Return each case with each way that it can go.

    Args:
        names: The ways; none takes those of ``WAYS``, and two of ``MORE_WAYS`` for our own models.
            Their number has no factor in common with 4, since CI takes each fourth case.
    """
    more = [(MORE_WAYS[number], MORE_WAYS[(number + 1) % 3]) for number in range(3)]
    return [
        (case, way)
        for number, case in enumerate(CASES)
        for way in names or (*WAYS, *(more[number % 3] if case in OWN_CASES else ()))
        if not case.lacks(way)
    ]


def cases(judge: str = "") -> list[Case]:
    """Return the cases to which a judge applies."""
    return [case for case in CASES if not case.lacks(judge)]


__all__ = [
    "CASES",
    "OWN_CASES",
    "WAYS",
    "Case",
    "Inputs",
    "Named",
    "cases",
    "of_program",
    "program",
    "ways",
]

"""Export a language model to a program that generates text."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from lowerdeck.emitter import EmitConfig, EmitterError
from lowerdeck.language_models.custom_kernels import KERNELS as ATTENTION_KERNELS
from lowerdeck.language_models.decoder import CachedDecoder, export_decoder
from lowerdeck.language_models.embeddings import KERNELS as EMBEDDING_KERNELS
from lowerdeck.language_models.embeddings import quantize_embedding as quantize_rows
from lowerdeck.language_models.errors import LanguageModelError, UnsupportedModelError
from lowerdeck.language_models.folder import Vocabulary, load_folder, vocabulary_of
from lowerdeck.language_models.generating import DECODE
from lowerdeck.language_models.quantization import Quantized, quantize_linears
from lowerdeck.language_models.steps import Steps
from lowerdeck.lowered_module import LoweredProgram, lower
from lowerdeck.xnnpack import XnnpackPartitioner

QUANTIZATIONS = ("none", "fp16", "8da4w", "8da8w")
BACKENDS = ("xnnpack", "portable")
ATTENTIONS = ("delegate", "custom-kernel")


def export_language_model(
    model: PreTrainedModel | str | os.PathLike[str],
    *,
    quantize: str = "none",
    group: int = 32,
    quantize_embedding: int | None = None,
    context: int = 2048,
    backend: str = "xnnpack",
    attention: str = "delegate",
    prefill_chunk: int | None = None,
    separate_decode: bool = False,
) -> LoweredProgram:
    """Return the program of a decoder, for text generation with the official runner.

    Its method ``forward`` maps tokens and their positions to the logits of the next token.
    Constant methods return the vocabulary size, the context length and the end-of-text tokens.

    Args:
        model: A decoder of transformers, or the folder of one.
        quantize: Format of the weights of linear layers: ``"none"``; ``"fp16"`` stores weights in
            float16; ``"8da4w"`` and ``"8da8w"`` quantise weights to 4 or 8 bits, and activations
            to 8 at run time.
        group: Number of weights that share a scale in ``"8da4w"``.
        quantize_embedding: Bits of the embedding, 8 or 4; None for no quantisation. The
            application must link the quantised kernels.
        context: Largest number of tokens of a text; reduced to the model's own limit.
        backend: ``"xnnpack"``, or ``"portable"`` for only the runtime's own kernels.
        attention: ``"delegate"``, or ``"custom-kernel"`` for ``llama::custom_sdpa``, which the
            application must link.
        prefill_chunk: Largest number of tokens in one call; None for the whole context.
        separate_decode: Whether to add a method ``decode`` for exactly one token, which shares
            weights and cache with ``forward``.

    Raises:
        FolderError: The folder cannot be loaded.
        UnsupportedModelError: The model is not a decoder that can be exported with a static cache.
        LanguageModelError: An argument is out of range, or conflicts with another.
    """
    prepared_model = prepared(
        model,
        quantize=quantize,
        group=group,
        quantize_embedding=quantize_embedding,
        context=context,
        backend=backend,
        attention=attention,
        prefill_chunk=prefill_chunk,
        separate_decode=separate_decode,
    )
    if prepared_model.quantized is not None and prepared_model.quantized.is_little:
        warnings.warn(
            f"{quantize} quantised only {prepared_model.quantized.line()}",
            UserWarning,
            stacklevel=2,
        )
    return lower_decoder(prepared_model)


class Prepared(NamedTuple):
    """A decoder ready for export, with its settings.

    Attributes:
        context: Largest number of tokens of a text.
        chunk: Largest number of tokens in one call.
        kernels: Kernels that the runtime must have in addition to the portable ones.
        separate_decode: Whether single tokens have a separate method.
        quantized: Counts of quantised and float weights; None without quantisation.
    """

    decoder: CachedDecoder
    context: int
    chunk: int
    kernels: frozenset[str]
    partitioners: Sequence[XnnpackPartitioner]
    separate_decode: bool
    quantized: Quantized | None = None


def prepared(
    model: PreTrainedModel | str | os.PathLike[str],
    *,
    quantize: str,
    group: int,
    quantize_embedding: int | None,
    context: int,
    backend: str,
    attention: str,
    prefill_chunk: int | None,
    separate_decode: bool,
    steps: Steps | None = None,
) -> Prepared:
    """Return the decoder that ``export_language_model`` exports, from the same arguments.

    Args:
        steps: Receives the progress; None for no report.
    """
    steps = steps or Steps()
    _check("quantize", quantize, QUANTIZATIONS)
    _check("backend", backend, BACKENDS)
    _check("attention", attention, ATTENTIONS)
    _check("quantize_embedding", quantize_embedding, (None, *EMBEDDING_KERNELS))
    for name, count in (("context", context), ("prefill_chunk", prefill_chunk)):
        if count is not None and count < 1:
            raise LanguageModelError(f"{name} is {count} tokens, expected at least 1")
    if quantize == "fp16" and backend != "xnnpack":
        raise LanguageModelError(
            "quantize='fp16' requires backend='xnnpack', whose delegates store float16 weights; "
            f"the kernels of backend={backend!r} compute in the model's own dtype"
        )
    with steps.step("load", "loading the model"):
        loaded = (
            _copy_sharing_weights(model)
            if isinstance(model, PreTrainedModel)
            # XNNPACK's delegates store float16 weights; the runtime's own kernels would convert
            # them in each call.
            else load_folder(Path(model), mapped=backend == "xnnpack")
        )
    context = min([context, *_length_limits(loaded)])
    kernels: set[str] = set()
    # Before quantisation, so that models that cannot be exported fail early.
    _check_positions(loaded.config.get_text_config(), context)
    _keep_frequencies(loaded)
    custom = attention == "custom-kernel"
    with steps.step("try", "trying it with a cache"):
        decoder = CachedDecoder(loaded, context, custom_kernel=custom)
    if custom:
        kernels |= ATTENTION_KERNELS
    if quantize_embedding is not None:
        quantize_rows(loaded, quantize_embedding)
        kernels.add(EMBEDDING_KERNELS[quantize_embedding])
    quantized = None
    if quantize in {"8da4w", "8da8w"}:
        with steps.step("quantise", f"quantising linear layers to {quantize}"):
            # XNNPACK stores group scales in bfloat16; round them in the decoder as well.
            scales = torch.bfloat16 if backend == "xnnpack" else None
            quantized = quantize_linears(loaded, quantize, group, scales=scales)
    precision = "fp16" if quantize == "fp16" else None
    partitioners = [XnnpackPartitioner(precision=precision)] if backend == "xnnpack" else []
    chunk = min(prefill_chunk or context, context)
    return Prepared(
        decoder, context, chunk, frozenset(kernels), partitioners, separate_decode, quantized
    )


def lower_decoder(prepared_model: Prepared, steps: Steps | None = None) -> LoweredProgram:
    """Return the lowered program of a decoder.

    Args:
        steps: Receives the progress; None for no report.

    Raises:
        UnsupportedModelError: The program cannot be emitted.
    """
    steps = steps or Steps()
    counts = {"forward": prepared_model.chunk} | (
        {DECODE: 1} if prepared_model.separate_decode else {}
    )
    programs = {}
    for name, count in counts.items():
        with steps.step(f"export {name}", f"exporting {name}, {count} tokens at once"):
            programs[name] = export_decoder(prepared_model.decoder, count)
    model: Any = prepared_model.decoder.model
    layers = model.config.get_text_config().num_hidden_layers
    try:
        with steps.step("lower", "lowering"):
            return lower(
                programs,
                prepared_model.partitioners,
                constant_methods=metadata(
                    vocabulary_of(model), prepared_model.context, prepared_model.chunk, layers
                ),
                config=EmitConfig(custom_kernels=prepared_model.kernels),
            )
    except EmitterError as error:
        raise UnsupportedModelError(
            f"a {model.config.model_type!r} model cannot be lowered for the runtime: {error}"
        ) from error


def _check_positions(config: Any, context: int) -> None:
    """Check that a longrope embedding does not change within the context."""
    rope_settings = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    for rope in (
        rope_settings,
        *(setting for setting in rope_settings.values() if isinstance(setting, dict)),
    ):
        if rope.get("rope_type", rope.get("type")) != "longrope":
            continue
        first = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        # Longer texts have other frequencies at all positions; cached keys have the old ones.
        if first is not None and context > first:
            raise UnsupportedModelError(
                f"the model's positions (longrope) change for texts of more than {first} tokens, "
                f"which would invalidate the cache, and the context is {context}: give a context "
                f"of at most {first}"
            )


def _length_limits(model: PreTrainedModel) -> Iterator[int]:
    """Yield each limit of the text length that the model's configuration sets."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len"):
        limit = getattr(config, name, None)
        if limit:
            yield limit
    for name, module in model.named_modules():
        # In RoBERTa and its variants positions start at the padding index plus one.
        counts = name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        if counts and module.padding_idx is not None:
            yield module.num_embeddings - module.padding_idx - 1


def _keep_frequencies(model: PreTrainedModel) -> None:
    """Make rotary frequencies constant if they change only beyond the model's own text length.

    transformers compares the text length with this limit in each call, a data-dependent
    condition that torch.export rejects. The context does not exceed the limit.
    """
    layer_: Any
    for layer_ in model.modules():
        kind = getattr(layer_, "rope_type", None)
        if kind == "dynamic":
            layer_.rope_type = "default"
        elif isinstance(kind, dict):  # by layer type
            kind.update(
                {layer: "default" for layer, rope_type in kind.items() if rope_type == "dynamic"}
            )


def _copy_sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that shares its weights, so that modules can be replaced."""
    tensors = [*model.parameters(), *model.buffers()]
    copied: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return copied.eval()


def metadata(vocabulary: Vocabulary, context: int, chunk: int, layers: int) -> Mapping[str, Any]:
    """Return the constant methods that runners call, by name.

    Args:
        context: Largest number of tokens of a text.
        chunk: Largest number of tokens in one call.
    """
    constants: dict[str, Any] = {
        "get_eos_ids": list(vocabulary.eos),
        "get_max_seq_len": chunk,
        "get_max_context_len": context,
        "get_vocab_size": vocabulary.size,
        "get_n_layers": layers,
        "use_kv_cache": True,
        "enable_dynamic_shape": chunk > 1,
        "use_sdpa_with_kv_cache": False,
    }
    if vocabulary.bos is not None:
        constants["get_bos_id"] = vocabulary.bos
    return constants


def _check(name: str, value: object, expected: tuple[object, ...]) -> None:
    if value not in expected:
        raise LanguageModelError(
            f"{name} is {value!r}, expected one of {', '.join(map(str, expected))}"
        )

"""A decoder with its key-value cache as state, from tokens and positions to logits."""

from __future__ import annotations

import inspect
import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from transformers.cache_utils import StaticCache, StaticLayer
from transformers.modeling_utils import PreTrainedModel

from lowerdeck.language_models.changes import SHORT, changes_of, shortened
from lowerdeck.language_models.custom_kernels import NAME, FilledLayer, register
from lowerdeck.language_models.errors import UnsupportedModelError, first_line

_EXAMPLE_TOKENS = 3
_SINGLE = (1, 1, 1)
_CROSSING = (SHORT - 1, 2, 1, 1)
"""Tokens per call: a call up to the length of the change, one across it, then single tokens."""
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}
_COARSE = 0.1
"""Tolerated rounding differences, relative to the largest logit."""


class PositionedLayer(StaticLayer):  # type: ignore[misc]
    """Keys and values of one layer, written at the caller's positions.

    The layer of transformers counts tokens, and does not restart the count for a new text.
    """

    positions: torch.Tensor
    start: Any
    """Number of tokens before the current ones; not a tensor, because some models slice by it."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of some tokens; return the whole cache.

        Args:
            key_states: Keys, ``[1, heads, n, width]``.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self.positions, key_states)
        self.values.index_copy_(2, self.positions, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """Return the number of tokens before the current ones."""
        return self.start


class CachedDecoder(nn.Module):
    """Decoder that computes the logits of the next token and keeps keys and values.

    The module takes tokens, ``int64[1, n]``, and their consecutive positions, ``int64[n]``, and
    returns logits, ``float[1, 1, vocabulary]``. The cache from the first position on is
    overwritten or ignored, so a new text starts at position 0.

    Args:
        model: A decoder of transformers.
        context: Capacity of the cache in tokens.
        custom_kernel: Whether to use ``llama::custom_sdpa`` for attention, which reads only the
            filled part of the cache.

    Raises:
        UnsupportedModelError: The model is not a decoder, or does not give the same logits with a
            static cache.
    """

    def __init__(
        self, model: PreTrainedModel, context: int, *, custom_kernel: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self._custom = custom_kernel
        self._context = context
        if custom_kernel:
            register()
            try:
                model.set_attn_implementation(NAME)
            except ValueError as error:
                raise UnsupportedModelError(
                    f"a {model.config.model_type!r} model has its own attention, which "
                    "llama::custom_sdpa does not compute: leave attention to the delegate"
                ) from error
        kind = FilledLayer if custom_kernel else PositionedLayer
        self.cache: StaticCache = _cache_of(model, context, kind)
        # transformers 5.24 renamed the argument and warns of the old name.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._passes_positions = True
        self._try_once()
        for index, layer in enumerate(self.cache.layers):
            # Layers that share another layer's keys and values have no cache.
            if layer.is_initialized:
                self.register_buffer(f"key_cache_{index}", layer.keys, persistent=False)
                self.register_buffer(f"value_cache_{index}", layer.values, persistent=False)

    def _try_once(self) -> None:
        """Compare short texts with and without the cache.

        The first token determines the sizes of keys and values, which configurations do not name
        consistently. Equal logits show that the family needs no other state, and whether positions
        can be passed: some families add an offset only if no positions are passed.
        """
        faults = []
        for self._passes_positions in (True, False):
            fault, cause = self._fault(_SINGLE)
            if fault is None:
                break
            faults.append((fault, cause))
        else:
            self._refuse(*faults[0])
        for count, name in changes_of(self.model, self._context).items():
            self._try_beyond(count, name)
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys.zero_()
                layer.values.zero_()

    def _try_beyond(self, count: int, name: str) -> None:
        """Compare a text that crosses the change at ``count`` tokens, moved to a few tokens."""
        with shortened(self.model, count):
            try:
                with torch.no_grad():
                    whole = self.without_cache(self._text(_CROSSING))
            except Exception:
                return  # the model fails for so few tokens
            fault, cause = self._fault(_CROSSING, whole)
        if fault is not None:
            advice = f"give a context of at most {count}"
            self._refuse(f"{fault}, in texts of more than {count} tokens ({name})", cause, advice)

    def _refuse(self, fault: str, cause: Exception | None, *advice: str) -> NoReturn:
        fallback = ("leave attention to the delegate",) if self._custom else ()
        remedies = ", or ".join((*advice, *fallback))
        raise UnsupportedModelError(
            f"a {self.model.config.model_type!r} model {fault}{remedies and ': '}{remedies}"
        ) from cause

    def _text(self, steps: Sequence[int]) -> torch.Tensor:
        words: int = self.model.config.get_text_config().vocab_size
        count = min(sum(steps), self._context)
        return ((words // 2 + torch.arange(count)) % words).unsqueeze(0)

    def _fault(
        self, steps: Sequence[int], whole: torch.Tensor | None = None
    ) -> tuple[str | None, Exception | None]:
        """Return the error in the logits of a text read in steps, and the exception, if any."""
        implementation = (
            "llama::custom_sdpa" if self._custom else "a static cache of keys and values"
        )
        text = self._text(steps)
        ends = [end for end in accumulate(steps) if end <= text.shape[1]]
        try:
            with torch.no_grad():
                parts = [
                    self(text[:, start:end], torch.arange(start, end))
                    for start, end in pairwise([0, *ends])
                ]
                if whole is None:
                    whole = self.without_cache(text)
                    self._refuse_encoder(text, whole)
        except UnsupportedModelError:
            raise
        except Exception as error:
            return (
                f"fails with {implementation}: {type(error).__name__}: {first_line(error)}"
            ), error
        expected = whole[:, [end - 1 for end in ends]]
        largest = float(expected.abs().max())
        difference = float((torch.cat(parts, 1) - expected).abs().max())
        if difference <= _bound(expected):
            return None, None
        return (
            f"gives other logits with {implementation} than without: logits of {largest:.3g} "
            f"differ by {difference:.3g}"
        ), None

    def _refuse_encoder(self, text: torch.Tensor, whole: torch.Tensor) -> None:
        # The first token's logits depend on later tokens only in an encoder.
        early = self.without_cache(text[:, :1])
        if float((whole[:, :1] - early).abs().max()) > _bound(whole):
            raise UnsupportedModelError(
                f"a {self.model.config.model_type!r} model attends to later tokens: it is an "
                "encoder, which does not generate text"
            )

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token.

        Args:
            positions: Positions of the tokens in the text, ``int64[n]``.
        """
        start = self._start(tokens, positions)
        for layer in self.cache.layers:
            layer.positions, layer.start = positions, start
        more: dict[str, Any] = {self._cache_argument: self.cache}
        if self._passes_positions:
            more["position_ids"] = positions.unsqueeze(0)
        if self._custom:
            more["start_position"] = start
        outputs = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **more)
        logits: torch.Tensor = outputs.logits
        return logits

    def without_cache(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token of a text, computed at once and without a cache.

        Args:
            tokens: The text, ``int64[1, n]``.
        """
        if self._custom:
            # The kernel's attention is always causal.
            _compute_in_torch(self.model)
        try:
            logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            if self._custom:
                self.model.set_attn_implementation(NAME)
        return logits

    def _start(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        start: Any = positions[0].item()
        check: Any = torch._check
        check(start >= 0)
        check(start + tokens.shape[1] <= self._context)
        return start


def _bound(logits: torch.Tensor) -> float:
    """Return the tolerance for logits computed in another order."""
    return _ROUNDING.get(logits.dtype, _COARSE) * float(logits.abs().max())


def _compute_in_torch(model: PreTrainedModel) -> None:
    """Set a model's attention to an implementation in ATen operators."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # some families do not have it
        model.set_attn_implementation("eager")


def _cache_of(model: PreTrainedModel, context: int, kind: type[StaticLayer]) -> StaticCache:
    config = model.config.get_text_config()
    family = config.model_type
    if getattr(config, "is_encoder_decoder", False) or (
        not hasattr(model, "lm_head") and (model.get_output_embeddings() is None)
    ):
        raise UnsupportedModelError(
            f"{family!r} is not a decoder-only language model: lower it with `lowerdeck lower`"
        )
    try:
        cache = StaticCache(config=config, max_cache_len=context)
    except KeyError as error:
        raise UnsupportedModelError(
            f"{family!r} has {error} layers, for which transformers has no static cache"
        ) from error
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, StaticLayer):
            raise UnsupportedModelError(
                f"layer {index} of {family!r} has a {type(layer).__name__}, expected only keys "
                "and values: transformers has no static cache for this family"
            )
        # A sliding layer branches on runtime values; the mask implements its window.
        cache.layers[index] = kind(context)
    return cache


def export_decoder(decoder: CachedDecoder, tokens: int) -> ExportedProgram:
    """Return the program of a decoder.

    Args:
        tokens: Largest number of tokens in one call.

    Raises:
        UnsupportedModelError: ``torch.export`` cannot export it.
    """
    count = min(_EXAMPLE_TOKENS, tokens)
    example: tuple[Any, ...] = (torch.zeros(1, count, dtype=torch.int64), torch.arange(count))
    dim = Dim("tokens", min=1, max=tokens) if tokens > 1 else None
    shapes = {"tokens": {1: dim}, "positions": {0: dim}} if dim else None
    try:
        # torch prints the whole graph before its error.
        with torch.no_grad(), redirect_stderr(io.StringIO()):
            return torch.export.export(decoder.eval(), example, dynamic_shapes=shapes)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"torch.export cannot export a {decoder.model.config.model_type!r} model with a "
            f"static cache: {type(error).__name__}: {first_line(error)}"
        ) from error

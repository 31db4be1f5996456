"""What begins after many tokens is tried after a few."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import wraps
from typing import Any

import pytest
import torch
from folders import small_model
from torch import nn

from lowerdeck.language_models import CachedDecoder, UnsupportedModelError
from lowerdeck.language_models.changes import changes_of, shortened


def test_changes_are_those_within_the_context() -> None:
    model = small_model("Mistral", sliding_window=40)
    assert changes_of(model, 41) == {40: "sliding_window"}
    assert changes_of(model, 40) == {}
    # Numbers of layers have names alike.
    assert changes_of(small_model("Qwen2", max_window_layers=5), 48) == {}


def test_positions_that_change_are_found_in_tables_of_a_configuration() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    original = {"original_max_position_embeddings": 16}
    model = small_model("Llama", rope_parameters={**rope, **original})
    assert changes_of(model, 48) == {16: "original_max_position_embeddings"}
    CachedDecoder(model, 48)


def test_configurations_and_what_modules_took_of_them_are_short_for_a_while() -> None:
    model = small_model("Gemma2", sliding_window=40)
    before = copy.deepcopy(model.config.to_dict())
    windows = [one for one in model.modules() if vars(one).get("sliding_window") == 40]
    assert windows
    with suppress(ValueError), shortened(model, 40):
        assert model.config.sliding_window == 4
        assert all(one.sliding_window == 4 for one in windows)
        raise ValueError("whatever")
    assert model.config.to_dict() == before
    assert all(one.sliding_window == 40 for one in windows)


class Forgetful(nn.Module):
    """Takes another scale for texts beyond a number of tokens, as far as it sees them."""

    def __init__(self, inner: Any, config: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = config

    def forward(self, hidden: torch.Tensor, *rest: Any, **more: Any) -> Any:
        scale = 3.0 if hidden.shape[1] > self.config.recall_window else 1.0
        return self.inner(hidden * scale, *rest, **more)


def forgetful(count: object) -> Any:
    """Return a model that counts the tokens that it is given as those of the text."""
    model = small_model()
    model.config.recall_window = count
    layer = model.model.layers[0]
    layer.mlp = Forgetful(layer.mlp, model.config)
    return model


def test_a_change_that_a_cache_hides_is_named() -> None:
    words = r"in texts of more than 40 tokens \(recall_window\): give a context of at most 40"
    with pytest.raises(UnsupportedModelError, match=words):
        CachedDecoder(forgetful(40), 41)
    model = forgetful(40)
    CachedDecoder(model, 40)
    assert model.config.recall_window == 40


@pytest.mark.parametrize("context", [1, 2, 5])
def test_a_context_may_be_shorter_than_what_is_tried(context: int) -> None:
    model = small_model("Mistral", sliding_window=2)
    decoder = CachedDecoder(model, context)
    text = torch.arange(context).unsqueeze(0)
    with torch.no_grad():
        found = decoder(text, torch.arange(context))
        wanted = decoder.without_cache(text)[:, -1:]
    torch.testing.assert_close(found, wanted)


def test_a_model_that_can_do_nothing_with_so_few_is_left_alone() -> None:
    model = forgetful(40)
    usual = model.forward

    @wraps(usual)
    def forward(*args: Any, **named: Any) -> Any:
        if model.config.recall_window < 40:
            raise RuntimeError("so few")
        return usual(*args, **named)

    model.forward = forward
    CachedDecoder(model, 41)

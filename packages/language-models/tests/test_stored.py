"""Weights that stay in the files of their folder, and models that compute in float32 with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from folders import FAMILIES, save_folder
from safetensors.torch import load_file, save_file
from torch import nn

from lowerdeck.language_models import stored
from lowerdeck.language_models.folder import load_folder
from lowerdeck.language_models.quantization import quantize_linears
from lowerdeck.language_models.stored import StoredEmbedding, StoredLinear

TEXT = torch.tensor([[5, 9, 17, 33]])


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TEXT).logits
    return found


def _in_memory(model: nn.Module) -> int:
    """Return how many elements of a model torch could move, as it cannot those of files."""
    held = {one.untyped_storage()._cdata: one for one in (*model.parameters(), *model.buffers())}
    return sum(one.numel() for one in held.values() if one.untyped_storage().resizable())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mapped_model_computes_what_a_read_one_does(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_folder(tmp_path, family, dtype, max_shard_size="100KB")
    mapped, read = load_folder(tmp_path, mapped=True), load_folder(tmp_path)
    assert mapped.dtype == read.dtype == torch.float32
    assert _logits(mapped).dtype == torch.float32
    assert torch.equal(_logits(mapped), _logits(read))


def test_large_weights_stay_in_their_files(tmp_path: Path) -> None:
    save_folder(tmp_path, "Llama", torch.bfloat16)
    mapped, read = load_folder(tmp_path, mapped=True), load_folder(tmp_path)
    linears = [one for one in mapped.modules() if isinstance(one, nn.Linear)]
    assert linears
    assert all(type(one) is StoredLinear for one in linears)
    assert type(mapped.get_input_embeddings()) is StoredEmbedding
    norms = sum(one.numel() for one in read.parameters() if one.dim() == 1)
    # Norms, and the frequencies of rotary embeddings.
    assert norms <= _in_memory(mapped) <= 1.2 * norms


def test_tied_weights_are_one(tmp_path: Path) -> None:
    model = save_folder(tmp_path, "Llama", torch.bfloat16)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    mapped: Any = load_folder(tmp_path, mapped=True)
    assert mapped.lm_head.stored is mapped.model.embed_tokens.stored
    assert torch.equal(_logits(mapped), _logits(load_folder(tmp_path)))


def test_numbers_that_would_be_rounded_are_read(tmp_path: Path) -> None:
    # One norm in float32, as checkpoints of mixed precision have them.
    save_folder(tmp_path, "Llama", torch.bfloat16)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = next(one for one in weights if "norm" in one)
    weights[name] = weights[name].float() + 1e-5
    save_file(weights, file, {"format": "pt"})
    found = load_folder(tmp_path, mapped=True)
    assert torch.equal(found.state_dict()[name], weights[name])


def test_quantised_weights_go_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_SMALL", 64)
    save_folder(tmp_path, "Llama", torch.bfloat16)
    mapped, read = load_folder(tmp_path, mapped=True), load_folder(tmp_path)
    quantize_linears(mapped, "8da4w", 32)
    monkeypatch.setattr(stored, "tensor_in_file", lambda *_: None)
    quantize_linears(read, "8da4w", 32)
    assert torch.equal(_logits(mapped), _logits(read))
    assert _in_memory(mapped) < _in_memory(read) / 10


def test_a_layer_of_two_parents_is_quantised_once() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(32, 32)
    twice = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared)).eval()
    once = nn.Sequential(nn.Linear(32, 32)).eval()
    once[0].load_state_dict(shared.state_dict())
    quantize_linears(twice, "8da8w", 32)
    quantize_linears(once, "8da8w", 32)
    x = torch.randn(2, 32)
    with torch.no_grad():
        assert torch.equal(twice(x), once(once(x)))

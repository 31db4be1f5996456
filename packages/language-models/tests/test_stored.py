"""Weights that stay in the files of their folder, and models that compute in float32 with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import FAMILIES, save_folder, small_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from lowerdeck.language_models import exporting, quantization, stored
from lowerdeck.language_models.folder import load_folder
from lowerdeck.language_models.quantization import Quantized, quantize_linears
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


GROWTH = """
import sys, threading, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
from torch import nn
from lowerdeck.language_models.quantization import quantize_linears
from lowerdeck.language_models.stored import keep_stored

def held():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def watch():
    while True:
        most[0] = max(most[0], held())
        time.sleep(0.002)

torch.set_num_threads(1)
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(2048, 1280, bias=False) for _ in range(16)))
count = 2048 * 1280 * 16
flat = torch.from_file(sys.argv[1], shared=False, size=count, dtype=torch.bfloat16)
for index, layer in enumerate(model):
    layer.weight = nn.Parameter(flat.view(16, 1280, 2048)[index], requires_grad=False)
keep_stored(model)
quantize_linears(nn.Sequential(nn.Linear(64, 64)), "8da4w", 32)
most = [0]
before = held()
threading.Thread(target=watch, daemon=True).start()
quantize_linears(model, "8da4w", 32)
print(most[0] - before, held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measured in /proc")
def test_quantising_takes_less_memory_than_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    size = 2 * 2048 * 1280 * 16
    file.write_bytes(b"\x0a\x3c" * (size // 2))
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    most, after = map(int, done.stdout.split())
    # Layers of 10 MB as floats: all together glibc would keep 170 MB of a folder of 84 MB.
    assert after < size / 2
    assert most < size


@pytest.mark.parametrize("mode", ["8da4w", "8da8w"])
def test_pieces_are_quantised_as_the_whole(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole, pieces = nn.Sequential(nn.Linear(64, 50)), nn.Sequential(nn.Linear(64, 50))
    pieces.load_state_dict(whole.state_dict())
    quantize_linears(whole, mode, 32)
    monkeypatch.setattr(quantization, "_PIECE", 64 * 7)
    quantize_linears(pieces, mode, 32)
    alike = zip(whole.state_dict().values(), pieces.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in alike)


def test_a_library_that_cannot_give_memory_back_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    stored._trim.cache_clear()
    stored.release_freed_memory()
    stored._trim.cache_clear()


def test_transposed_linear_layers_are_quantised_too() -> None:
    torch.manual_seed(0)
    transposed, plain = Conv1D(48, 64), nn.Linear(64, 48)
    with torch.no_grad():
        transposed.bias.normal_()
        plain.weight.copy_(transposed.weight.t())
        plain.bias.copy_(transposed.bias)
    one, other = nn.Sequential(transposed), nn.Sequential(plain)
    told = [quantize_linears(each, "8da4w", 32) for each in (one, other)]
    assert told[0] == told[1] == Quantized(48 * 64, {})
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(one(x), other(x))


def test_what_stays_floats_is_told() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates = nn.Parameter(torch.ones(8, 50, 100))

    model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 1000), nn.Linear(48, 50), Experts())
    told = quantize_linears(model, "8da4w", 32)
    assert told.line() == (
        "46.2% of 138,400 weights; float: 28.9% Experts (not linear layers), 23.1% embeddings, "
        "1.7% linear layers with rows that are not a multiple of 32"
    )
    assert list(told.left.values()) == [40000, 32000, 2400]
    assert not told.is_little
    assert Quantized(10, {"Experts": 11}).is_little


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


@pytest.mark.parametrize(("backend", "rounded"), [("xnnpack", True), ("portable", False)])
def test_scales_are_bfloat16_if_xnnpack_stores_them(backend: str, rounded: bool) -> None:
    """Otherwise the decoder of a mixture of experts may choose other experts than the file."""
    prepared: Any = exporting.prepared(
        small_model(),
        quantize="8da4w",
        group=32,
        quantize_embedding=None,
        context=32,
        backend=backend,
        attention="delegate",
        prefill_chunk=None,
        separate_decode=False,
    )
    scales = [
        module.weight.scale
        for module in prepared.decoder.modules()
        if hasattr(getattr(module, "weight", None), "scale")
    ]
    assert scales
    same = [torch.equal(scale, scale.bfloat16().to(scale.dtype)) for scale in scales]
    assert all(same) if rounded else not all(same)

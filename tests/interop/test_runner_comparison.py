"""compare() on right programs of one operator each, and of attention: no difference is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lowerdeck.emitter import emit
from lowerdeck.runner import compare, load
from lowerdeck_zoo import Of

pytestmark = pytest.mark.filterwarnings("ignore")


R = torch.randn
torch.manual_seed(0)
x, m, v, W = R(2, 3, 8, 8), R(4, 6), R(5), R(6, 6)
MODELS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "relu": (torch.relu, (m,)),
    "add": (lambda a, b: a + b, (m, R(4, 6))),
    "sub": (lambda a, b: a - b, (m, R(6))),
    "mul": (lambda a: a * 2, (m,)),
    "div": (lambda a: a / 3, (m,)),
    "pow": (lambda a: a**2, (m,)),
    "exp": (torch.exp, (m,)),
    "log": (lambda a: torch.log(a.abs() + 1), (m,)),
    "sqrt": (lambda a: a.abs().sqrt(), (m,)),
    "rsqrt": (lambda a: (a.abs() + 1).rsqrt(), (m,)),
    "sigmoid": (torch.sigmoid, (m,)),
    "tanh": (torch.tanh, (m,)),
    "gelu": (F.gelu, (m,)),
    "silu": (F.silu, (m,)),
    "elu": (F.elu, (m,)),
    "leaky": (F.leaky_relu, (m,)),
    "hardswish": (F.hardswish, (m,)),
    "hardsigmoid": (F.hardsigmoid, (m,)),
    "softplus": (F.softplus, (m,)),
    "mish": (F.mish, (m,)),
    "softmax": (lambda a: a.softmax(-1), (m,)),
    "softmax0": (lambda a: a.softmax(0), (m,)),
    "log_softmax": (lambda a: a.log_softmax(-1), (m,)),
    "logsumexp": (lambda a: a.logsumexp(-1), (m,)),
    "sum": (lambda a: a.sum(1), (m,)),
    "mean": (lambda a: a.mean(1), (m,)),
    "var": (lambda a: a.var(1), (m,)),
    "std": (lambda a: a.std(1), (m,)),
    "amax": (lambda a: a.amax(1), (m,)),
    "max": (lambda a: a.max(1)[0], (m,)),
    "maxidx": (lambda a: a.max(1), (m,)),
    "argmax": (lambda a: a.argmax(1), (m,)),
    "prod": (lambda a: a.prod(1), (m,)),
    "cumsum": (lambda a: a.cumsum(1), (m,)),
    "norm": (lambda a: torch.linalg.vector_norm(a, dim=1), (m,)),
    "mm": (lambda a: a @ W, (m,)),
    "bmm": (torch.bmm, (R(2, 3, 4), R(2, 4, 5))),
    "matmul4": (torch.matmul, (R(2, 3, 4, 5), R(2, 3, 5, 4))),
    "linear": (nn.Linear(6, 3), (m,)),
    "linear3": (nn.Linear(6, 3), (R(2, 4, 6),)),
    "linear_square": (nn.Linear(6, 6), (R(6, 6),)),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), (R(2, 3, 4), R(2, 5, 4))),
    "conv1d": (nn.Conv1d(3, 4, 3), (R(2, 3, 8),)),
    "conv2d": (nn.Conv2d(3, 4, 3, padding=1), (x,)),
    "dwconv": (nn.Conv2d(3, 3, 3, groups=3), (x,)),
    "convT": (nn.ConvTranspose2d(3, 4, 2, 2), (x,)),
    "bn": (nn.BatchNorm2d(3).eval(), (x,)),
    "ln": (nn.LayerNorm(6), (m,)),
    "gn": (nn.GroupNorm(3, 3), (x,)),
    "in": (nn.InstanceNorm2d(3), (x,)),
    "rms": (nn.RMSNorm(6), (m,)),
    "maxpool": (nn.MaxPool2d(2), (x,)),
    "avgpool": (nn.AvgPool2d(2), (x,)),
    "adaptive": (nn.AdaptiveAvgPool2d(1), (x,)),
    "adaptive2": (nn.AdaptiveAvgPool2d(3), (x,)),
    "upsample_n": (lambda a: F.interpolate(a, scale_factor=2), (x,)),
    "upsample_b": (lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), (x,)),
    "pad": (lambda a: F.pad(a, (1, 1)), (m,)),
    "padr": (lambda a: F.pad(a, (1, 1, 1, 1), mode="reflect"), (x,)),
    "cat": (lambda a, b: torch.cat([a, b]), (m, R(4, 6))),
    "stack": (lambda a, b: torch.stack([a, b]), (m, R(4, 6))),
    "split": (lambda a: a.split(2), (m,)),
    "chunk": (lambda a: a.chunk(2, 1), (m,)),
    "unbind": (lambda a: a.unbind(0), (m,)),
    "t": (lambda a: a.t(), (m,)),
    "permute": (lambda a: a.permute(1, 0) + 1, (m,)),
    "square_t": (lambda a: a.t() @ a, (R(4, 4),)),
    "view": (lambda a: a.view(-1) * 2, (m,)),
    "expand": (lambda a: a.expand(3, 5) + 1, (v,)),
    "repeat": (lambda a: a.repeat(2, 2), (m,)),
    "flip": (lambda a: a.flip(0), (m,)),
    "roll": (lambda a: a.roll(1, 0), (m,)),
    "tril": (lambda a: a.tril(), (m,)),
    "select": (lambda a: a[1] + a[0], (m,)),
    "slice": (lambda a: a[1:3] * 2, (m,)),
    "gather": (lambda a, i: a.gather(1, i), (m, torch.zeros(4, 2, dtype=torch.int64))),
    "index": (lambda a, i: a[i], (m, torch.tensor([0, 2]))),
    "index_select": (lambda a, i: a.index_select(0, i), (m, torch.tensor([0, 2]))),
    "embedding": (nn.Embedding(5, 4), (torch.tensor([[0, 1], [4, 2]]),)),
    "where": (lambda a: torch.where(a > 0, a, -a), (m,)),
    "clamp": (lambda a: a.clamp(-1, 1), (m,)),
    "masked_fill": (lambda a: a.masked_fill(a > 0, 0.0), (m,)),
    "topk": (lambda a: a.topk(2), (m,)),
    "floor": (torch.floor, (m,)),
    "round": (torch.round, (m,)),
    "abs": (torch.abs, (m,)),
    "neg": (torch.neg, (m,)),
    "sin": (torch.sin, (m,)),
    "erf": (torch.erf, (m,)),
    "maximum": (torch.maximum, (m, R(4, 6))),
    "eq": (lambda a, b: a == b, (m, m.clone())),
    "and": (lambda a, b: (a > 0) & (b > 0), (m, R(4, 6))),
    "arange": (lambda a: a + torch.arange(6), (m,)),
    "ones_like": (lambda a: torch.ones_like(a) + a, (m,)),
    "pixel": (lambda a: F.pixel_shuffle(a, 2), (R(1, 8, 3, 3),)),
    "glu": (F.glu, (m,)),
    "normalize": (F.normalize, (m,)),
    "cdist": (torch.cdist, (m, R(3, 6))),
    "addcmul": (lambda a, b: torch.addcmul(a, a, b), (m, R(4, 6))),
    "baddbmm": (torch.baddbmm, (R(2, 3, 5), R(2, 3, 4), R(2, 4, 5))),
    "outer": (torch.outer, (v, R(3))),
    "dot": (torch.dot, (v, R(5))),
    "mv": (torch.mv, (m, R(6))),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), (m, R(4, 6))),
    "mse": (F.mse_loss, (m, R(4, 6))),
    "ce": (F.cross_entropy, (m, torch.tensor([0, 1, 2, 3]))),
    "logit": (lambda a: torch.logit(a.sigmoid()), (m,)),
    "cosine": (F.cosine_similarity, (m, R(4, 6))),
    "bilinear": (nn.Bilinear(6, 6, 3), (m, R(4, 6))),
    "rnn": (nn.RNN(6, 6, batch_first=True), (R(2, 3, 6),)),
    "lstm": (nn.LSTM(6, 6, batch_first=True), (R(2, 3, 6),)),
    "gru": (nn.GRU(6, 6, batch_first=True), (R(2, 3, 6),)),
    "sdpa": (F.scaled_dot_product_attention, (R(1, 2, 4, 8), R(1, 2, 4, 8), R(1, 2, 4, 8))),
    "sdpa_causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (R(1, 2, 4, 4), R(1, 2, 4, 4), R(1, 2, 4, 4)),
    ),
    "mha": (nn.MultiheadAttention(8, 2, batch_first=True).eval(), (R(2, 4, 8),) * 3),
    "mha_cross": (
        nn.MultiheadAttention(8, 2, batch_first=True).eval(),
        (R(2, 4, 8), R(2, 6, 8), R(2, 6, 8)),
    ),
    "mha_seqfirst": (nn.MultiheadAttention(8, 2).eval(), (R(4, 2, 8),) * 3),
    "mha_sq": (nn.MultiheadAttention(8, 2, batch_first=True).eval(), (R(8, 8, 8),) * 3),
    "enc": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (R(2, 4, 8),)),
    "dec": (
        nn.TransformerDecoderLayer(8, 2, 16, batch_first=True).eval(),
        (R(2, 4, 8), R(2, 4, 8)),
    ),
    "enc_sq": (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval(), (R(8, 8, 8),)),
    "mlp_same": (
        nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
        (R(6, 6),),
    ),
    "addadd": (lambda a, b: (a + b) * (b + a * 2) + (a - b), (m, R(4, 6))),
    "transposes": (lambda a, b: (a.t() @ b.t()).t() @ a, (R(4, 4), R(4, 4))),
}


def built(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    function, inputs = MODELS[name]
    module = function if isinstance(function, nn.Module) else Of(function)
    return module.eval(), inputs


@pytest.mark.parametrize("name", MODELS)
def test_a_right_program_has_no_difference(name: str) -> None:
    module, inputs = built(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(module, inputs)
        emitted = emit(exported)
    for debug in (None, emitted):
        program = load(emitted.to_bytes(), memory="poison", debug=debug)
        for reference in (module, exported):
            comparison = compare(program, reference, inputs)
            assert comparison.first is None, str(comparison)


WITH_WEIGHTS = [
    n for n, (f, _) in MODELS.items() if isinstance(f, nn.Module) and [*f.parameters()]
]


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_a_spoilt_weight_makes_a_difference(name: str) -> None:
    module, inputs = built(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        emitted = emit(torch.export.export(module, inputs))
    program = load(emitted.to_bytes(), debug=emitted)
    weight = next(module.parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(before * 1.5 + 0.1)
        try:
            assert compare(program, module, inputs).first is not None
        finally:
            weight.copy_(before)

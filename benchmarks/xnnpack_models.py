"""The float32 models that the XNNPACK backends are compared on, made from configurations alone.

torchvision, timm and transformers are imported when one of their models is asked for; where they
are missing, the comparison says so and goes on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lowerdeck_zoo as zoo
from lowerdeck_zoo.models.libraries import import_torchvision

Example = tuple[nn.Module, tuple[Any, ...]]


class Result(nn.Module):
    """Returns one of the results of a model that returns many by name."""

    def __init__(self, model: nn.Module, result: str, inputs: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.model = model
        self.result = result
        self.inputs = inputs

    def forward(self, *values: Tensor) -> Any:
        named = dict(zip(self.inputs, values, strict=False))
        return self.model(*values[len(named) :], **named)[self.result]


class UNet(nn.Module):
    """Halves an image three times and brings it back, by transposed convolutions or bilinearly."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        widths = (16, 32, 64, 128)
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip((3, *widths), widths, strict=False))
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 2, stride=2)
            if transposed
            else nn.Sequential(
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
                nn.Conv2d(a, b, 1),
            )
            for a, b in pairs
        )
        self.join = nn.ModuleList(_twice(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for other, up, join in zip(kept[-2::-1], self.up, self.join, strict=True):
            x = join(torch.cat([up(x), other], dim=1))
        return self.head(x)


def _twice(channels: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        *(nn.BatchNorm2d(width), nn.ReLU()),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        *(nn.BatchNorm2d(width), nn.ReLU()),
    )


class Recurrent(nn.Module):
    """Classifies a sentence by the last state of an LSTM or a GRU."""

    def __init__(self, layer: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.layer = layer(64, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens))[0][:, -1])


class SeparableConvolutions(nn.Module):
    """Finds words in sound: depthwise and pointwise convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, width in ((40, 64), (64, 64), (64, 128), (128, 128)):
            layers += [
                nn.Conv1d(channels, channels, 9, padding=4, groups=channels, bias=False),
                nn.Conv1d(channels, width, 1, bias=False),
                *(nn.BatchNorm1d(width), nn.ReLU()),
            ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(128, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(2))


class WaveNet(nn.Module):
    """Gated convolutions over time, each looking back twice as far as the one before."""

    def __init__(self, width: int = 32, depth: int = 8) -> None:
        super().__init__()
        self.entry = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2**number) for number in range(depth)
        )
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 64, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        total = torch.zeros_like(x)
        for number, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            left, right = gate(F.pad(x, (2**number, 0))).chunk(2, dim=1)
            found = skip(torch.tanh(left) * torch.sigmoid(right))
            total = total + found
            x = x + found
        return self.head(total)


class Detector(nn.Module):
    """A small one in the manner of YOLO: CSP blocks, pooling at three sizes, two scales, boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_unit(3, 16, 3, 2), _unit(16, 32, 3, 2), Split(32))
        self.middle = nn.Sequential(_unit(32, 64, 3, 2), Split(64))
        self.deep = nn.Sequential(_unit(64, 128, 3, 2), Split(128), Pyramid(128))
        self.join = nn.Sequential(_unit(192, 64), Split(64))
        self.heads = nn.ModuleList(nn.Conv2d(width, 4 + 20, 1) for width in (64, 128))

    def forward(self, x: Tensor) -> Tensor:
        middle = self.middle(self.stem(x))
        deep = self.deep(middle)
        raised = F.interpolate(deep, scale_factor=2, mode="nearest")
        scales = (self.join(torch.cat([raised, middle], dim=1)), deep)
        found = [
            self._boxes(head(one), 160 // one.shape[-1])
            for head, one in zip(self.heads, scales, strict=True)
        ]
        return torch.cat(found, dim=1)

    def _boxes(self, x: Tensor, stride: int) -> Tensor:
        height, width = x.shape[-2:]
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        grid = torch.stack([columns, rows], dim=-1).reshape(1, -1, 2).float()
        x = x.flatten(2).transpose(1, 2)
        centres = (torch.sigmoid(x[..., :2]) * 2 - 0.5 + grid) * stride
        sizes = torch.exp(x[..., 2:4]) * stride
        corners = [centres - sizes / 2, centres + sizes / 2]
        return torch.cat([*corners, torch.sigmoid(x[..., 4:])], dim=-1)


def _unit(channels: int, width: int, kernel: int = 1, stride: int = 1) -> nn.Module:
    layer = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(width), nn.SiLU())


class Split(nn.Module):
    """A CSP block: one half of the channels passes two convolutions, the other none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = _unit(width, width)
        self.inner = nn.Sequential(
            _unit(width // 2, width // 2, 3), _unit(width // 2, width // 2, 3)
        )
        self.leave = _unit(3 * width // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        kept, passed = self.enter(x).chunk(2, dim=1)
        return self.leave(torch.cat([kept, passed, passed + self.inner(passed)], dim=1))


class Pyramid(nn.Module):
    """Pools one image again and again and joins what comes of it (SPPF)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = _unit(width, width // 2)
        self.leave = _unit(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.enter(x)]
        for _ in range(3):
            found.append(F.max_pool2d(found[-1], 5, 1, 2))
        return self.leave(torch.cat(found, dim=1))


class Layers(nn.Module):
    """Layers one after another, whose names begin with no digit: the peer fails on those."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _mlp() -> nn.Module:
    return Layers(
        *(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.LeakyReLU()),
        *(nn.Linear(256, 256), nn.LayerNorm(256), nn.ELU()),
        *(nn.Linear(256, 64), nn.LogSoftmax(-1)),
    )


def _generator() -> nn.Module:
    layers: list[nn.Module] = [nn.ConvTranspose2d(64, 128, 4, bias=False)]
    for width in (128, 64, 32):
        up = nn.ConvTranspose2d(width, width // 2, 4, 2, 1, bias=False)
        layers += [nn.BatchNorm2d(width), nn.ReLU(), up]
    return Layers(
        *layers, nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh()
    )


def _super_resolution() -> nn.Module:
    return Layers(
        *(nn.Conv2d(1, 64, 5, padding=2), nn.Tanh()),
        *(nn.Conv2d(64, 32, 3, padding=1), nn.Tanh()),
        *(nn.Conv2d(32, 9, 3, padding=1), nn.PixelShuffle(3)),
    )


def _video() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, width in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv3d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)]
    return Layers(*layers, nn.Flatten(), nn.Linear(64 * 2 * 7 * 7, 10))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


_OWN: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...] | str]] = {
    "unet_transposed": (lambda: UNet(transposed=True), (1, 3, 96, 96)),
    "unet_bilinear": (lambda: UNet(transposed=False), (1, 3, 96, 96)),
    "lstm": (lambda: Recurrent(nn.LSTM), "tokens"),
    "gru": (lambda: Recurrent(nn.GRU), "tokens"),
    "dcgan": (_generator, (1, 64, 1, 1)),
    "espcn": (_super_resolution, (1, 1, 64, 64)),
    "separable_1d": (SeparableConvolutions, (1, 40, 98)),
    "wavenet": (WaveNet, (1, 1, 1000)),
    "encoder": (_encoder, (1, 64, 128)),
    "mlp": (_mlp, (1, 128)),
    "c3d": (_video, (1, 3, 16, 56, 56)),
    "yolo": (Detector, (1, 3, 160, 160)),
}
_TORCHVISION = (
    *("mobilenet_v2", "mobilenet_v3_small", "resnet18", "resnext50_32x4d", "shufflenet_v2_x1_0"),
    *("squeezenet1_1", "efficientnet_b0", "regnet_y_400mf", "densenet121", "googlenet"),
    *("convnext_tiny", "swin_t", "lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"),
)
_TIMM = (
    *(
        "mobilenetv4_conv_small",
        "mobilevit_xxs",
        "ghostnet_100",
        "edgenext_xx_small",
        "fastvit_t8",
    ),
    *("levit_128s", "vit_tiny_patch16_224", "convnextv2_atto", "poolformer_s12", "mixer_s32_224"),
    "pvt_v2_b0",
)
_TEXT = {"vocab_size": 1000, "max_position_embeddings": 512}
_SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
_WIDE = {**_SMALL, "hidden_size": 256, "intermediate_size": 512}
_FEW_KEYS = {"num_key_value_heads": 2, "tie_word_embeddings": False}
_PICTURE = {"pixel_values": (1, 3, 96, 96)}
_BIG_PICTURE = {"pixel_values": (1, 3, 128, 128)}
_TOKENS = {"input_ids": 64}
_MORE_TOKENS = {"input_ids": 256}
_TRANSFORMERS: Mapping[str, tuple[str, str, dict[str, Any], dict[str, Any], str]] = {
    "bert": ("BertModel", "BertConfig", {**_TEXT, **_SMALL}, _TOKENS, "last_hidden_state"),
    "clip": (
        *("CLIPVisionModel", "CLIPVisionConfig"),
        {**_SMALL, "image_size": 96, "patch_size": 16},
        *(_PICTURE, "last_hidden_state"),
    ),
    "gpt2": (
        *("GPT2LMHeadModel", "GPT2Config"),
        {"vocab_size": 1000, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_inner": 256},
        *(_TOKENS, "logits"),
    ),
    "llama": (
        *("LlamaForCausalLM", "LlamaConfig"),
        *({**_TEXT, **_SMALL, **_FEW_KEYS}, _TOKENS, "logits"),
    ),
    "qwen3": (
        *("Qwen3ForCausalLM", "Qwen3Config"),
        {**_TEXT, **_SMALL, **_FEW_KEYS, "head_dim": 32},
        *(_TOKENS, "logits"),
    ),
    "t5": (
        *("T5EncoderModel", "T5Config"),
        {"vocab_size": 1000, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2}
        | {"num_heads": 4},
        *(_TOKENS, "last_hidden_state"),
    ),
    "segformer": (
        *("SegformerForSemanticSegmentation", "SegformerConfig"),
        {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "decoder_hidden_size": 64},
        *(_BIG_PICTURE, "logits"),
    ),
    "whisper": (
        *("models.whisper.modeling_whisper.WhisperEncoder", "WhisperConfig"),
        {"d_model": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "num_mel_bins": 80}
        | {"encoder_ffn_dim": 256, "max_source_positions": 100},
        *({"input_features": (1, 80, 200)}, "last_hidden_state"),
    ),
    "wav2vec2": (
        *("Wav2Vec2Model", "Wav2Vec2Config"),
        {**_SMALL, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16}
        | {"num_conv_pos_embedding_groups": 4},
        *({"input_values": (1, 8000)}, "last_hidden_state"),
    ),
    "conformer": (
        *("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig"),
        {**_SMALL, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16}
        | {"num_conv_pos_embedding_groups": 4},
        *({"input_values": (1, 8000)}, "last_hidden_state"),
    ),
    "mobilevit": (
        *("MobileViTModel", "MobileViTConfig"),
        {"image_size": 128},
        *(_BIG_PICTURE, "last_hidden_state"),
    ),
    "bert_256": ("BertModel", "BertConfig", {**_TEXT, **_WIDE}, _MORE_TOKENS, "last_hidden_state"),
    "llama_256": (
        *("LlamaForCausalLM", "LlamaConfig"),
        *({**_TEXT, **_WIDE, **_FEW_KEYS}, _MORE_TOKENS, "logits"),
    ),
}
NAMES: tuple[str, ...] = (
    *(f"torchvision/{name}" for name in _TORCHVISION),
    *(f"timm/{name}" for name in _TIMM),
    *(f"transformers/{name}" for name in _TRANSFORMERS),
    *(f"own/{name}" for name in _OWN),
)
"""All models: where they are from, and their names there."""


def build(name: str) -> Example:
    """Return a model in evaluation mode with random weights, and inputs.

    Raises:
        ImportError: The package that the model is from is not installed.
        RuntimeError: Its results are the same for other inputs, so that no error would show.
    """
    torch.manual_seed(0)
    origin, _, own = name.partition("/")
    model, inputs = {
        "torchvision": _of_torchvision,
        "timm": _of_timm,
        "transformers": _of_transformers,
        "own": _own,
    }[origin](own)
    _draw_zeros(model.eval())
    _give_statistics(model, inputs)
    check_dependence(name, model, inputs)
    return model, inputs


def _draw_zeros(model: nn.Module) -> None:
    """Draw heads and scales that begin at 0, or close to it: they hide all that is before them."""
    for name, part in model.named_parameters():
        if not name.endswith("bias") and float(part.detach().abs().max()) <= _HIDING:
            if part.numel() == max(part.shape):
                nn.init.uniform_(part, 0.1, 0.5)
            else:
                nn.init.normal_(part, std=0.05)


_HIDING = 1e-4
_SAMPLES = 4


def _give_statistics(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Give batch norms the statistics of what they see, as training would.

    With others what an input says is lost on the way, and results are those of biases alone.
    """
    norms = [
        part
        for part in model.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is not None
    ]
    kept = [part.momentum for part in norms]
    for part in norms:
        part.train()
        part.momentum = None
        part.reset_running_stats()
    if norms:
        with torch.no_grad():
            drawn = [other_inputs(inputs) for _ in range(_SAMPLES)]
            model(*(torch.cat(same) for same in zip(*drawn, strict=True)))
    for part, momentum in zip(norms, kept, strict=True):
        part.eval()
        part.momentum = momentum


def other_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return inputs of the same sizes, drawn again."""
    return tuple(
        torch.randn(one.shape) if one.is_floating_point() else torch.randint(0, 1000, one.shape)
        for one in inputs
    )


def check_dependence(name: str, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse a model of which a result says nothing of its inputs.

    Raises:
        RuntimeError: A result changes by less than a hundredth of its largest number, or half of
            its numbers do not change.
    """
    with torch.no_grad():
        results = [pytree.tree_leaves(model(*given)) for given in (inputs, other_inputs(inputs))]
    for number, (first, second) in enumerate(zip(*results, strict=True)):
        if not isinstance(first, Tensor) or not first.is_floating_point():
            continue
        change = float((first - second).abs().max() / first.abs().max())
        same = float((first == second).float().mean())
        if not change >= _LEAST_CHANGE or same > _MOST_SAME:
            raise RuntimeError(
                f"result {number} of {name} changes by {change:.1e} of its largest number, and "
                f"{same:.0%} of it not at all, with other inputs: no error of what comes first "
                "would show; draw its weights otherwise"
            )


_LEAST_CHANGE = 0.01
_MOST_SAME = 0.5


def _own(name: str) -> Example:
    make, shape = _OWN[name]
    if isinstance(shape, str):
        return make(), (torch.randint(0, 1000, (1, 16)),)
    return make(), (torch.randn(shape),)


def _of_zoo(name: str) -> Example:
    program = zoo.program(name)
    return program.build(), program.inputs()[0]


def _of_torchvision(name: str) -> Example:
    model, inputs = _of_zoo(f"torchvision_{name}")
    if name.startswith(("deeplab", "lraspp")):
        return Result(model, "out"), (torch.randn(1, 3, 128, 128),)
    return model, inputs


def _of_timm(name: str) -> Example:
    return _of_zoo(f"timm_{name}")


def _of_transformers(name: str) -> Example:
    import_torchvision()
    transformers = importlib.import_module("transformers")
    path, config, settings, sizes, result = _TRANSFORMERS[name]
    folder, _, kind = path.rpartition(".")
    place = importlib.import_module(f"transformers.{folder}") if folder else transformers
    made = getattr(transformers, config)(**settings)
    made._attn_implementation = "eager" if name == "mobilevit" else "sdpa"
    if hasattr(made, "use_cache"):
        made.use_cache = False
    model = getattr(place, kind)(made)
    inputs = tuple(
        torch.randint(0, 1000, (1, size)) if isinstance(size, int) else torch.randn(size)
        for size in sizes.values()
    )
    return Result(model, result, tuple(sizes)), inputs

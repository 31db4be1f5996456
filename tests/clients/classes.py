"""The classes of transformers that the session ``clients`` lowers: small models, and their inputs.

The first group is what ExecuTorch's exir fails on, as transformers' own tests list it; the others
are of all kinds. A class is named with the kind of its inputs and with what its configuration
needs beyond ``small_config``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor

from lowerdeck_zoo.models.small_configs import SMALL_SIZES, small_config

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """How large the inputs are.

    Attributes:
        batch: Examples.
        length: Tokens; frames of audio are a multiple of it.
        side: Height and width of images, in pixels.
    """

    batch: int
    length: int
    side: int


EXPORTED = Size(batch=2, length=16, side=32)
OTHERS = (
    *(Size(3, 24, 48), Size(3, 24, 64), Size(3, 24, 32), Size(2, 11, 64), Size(2, 11, 48)),
    *(Size(3, 16, 32), Size(2, 24, 32), Size(2, 12, 32), Size(4, 32, 32)),
)
"""Sizes to try a dynamic file at: the first two that its program admits."""


def _ids(size: Size, most: int = 300) -> Tensor:
    return torch.randint(3, most, (size.batch, size.length))


def _text(size: Size, config: Any) -> Inputs:
    ids = _ids(size)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _text_only(size: Size, config: Any) -> Inputs:
    return {"input_ids": _ids(size)}


def _translation(size: Size, config: Any) -> Inputs:
    return {**_text(size, config), "decoder_input_ids": _ids(size)}


def _image(size: Size, config: Any) -> Inputs:
    channels = getattr(config, "num_channels", None) or 3
    return {"pixel_values": torch.randn(size.batch, channels, size.side, size.side)}


def _text_and_image(size: Size, config: Any) -> Inputs:
    return {**_text(size, config), **_image(size, config.vision_config)}


def _image_tokens(size: Size, config: Any) -> Inputs:
    """Return a text that has a place for each part of its image."""
    inputs = _text_and_image(size, config)
    vision = config.vision_config
    count = (size.side // vision.patch_size) ** 2
    inputs["input_ids"][:, 1 : 1 + count] = config.image_token_id
    return inputs


def _video(size: Size, config: Any) -> Inputs:
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 4)
    name = "pixel_values_videos" if "VJEPA" in type(config).__name__ else "pixel_values"
    return {name: torch.randn(size.batch, frames, 3, size.side, size.side)}


def _waveform(size: Size, config: Any) -> Inputs:
    return {"input_values": torch.randn(size.batch, 100 * size.length)}


def _mel(size: Size, config: Any) -> Inputs:
    return {"input_features": torch.randn(size.batch, config.num_mel_bins, 2 * size.length)}


def _frames(size: Size, config: Any) -> Inputs:
    width = getattr(config, "feature_projection_input_dim", None) or config.num_mel_bins
    return {"input_features": torch.randn(size.batch, 2 * size.length, width)}


def _speech_to_text(size: Size, config: Any) -> Inputs:
    frames = 2 * config.max_source_positions
    features = torch.randn(size.batch, config.num_mel_bins, frames)
    return {"input_features": features, "decoder_input_ids": _ids(size)}


def _spectrogram(size: Size, config: Any) -> Inputs:
    return {"input_values": torch.randn(size.batch, config.max_length, config.num_mel_bins)}


def _series(size: Size, config: Any) -> Inputs:
    return {
        "past_values": torch.randn(size.batch, config.context_length, config.num_input_channels)
    }


def _boxes(size: Size, config: Any) -> Inputs:
    boxes = torch.randint(0, 100, (size.batch, size.length, 4)).sort(-1).values
    return {**_text(size, config), "bbox": boxes}


def _patches(size: Size, config: Any) -> Inputs:
    """Return images cut into patches, which do not all have as many."""
    side, length = size.side // 8, getattr(config, "vision_config", config).num_patches
    sizes = [(side, side), (side - 1, side)][: size.batch]
    return {
        "pixel_values": torch.randn(len(sizes), length, 48),
        "pixel_attention_mask": torch.ones(len(sizes), length, dtype=torch.long),
        "spatial_shapes": torch.tensor(sizes),
    }


def _text_and_patches(size: Size, config: Any) -> Inputs:
    inputs = {**_text(size, config), **_patches(replace(size, batch=1), config)}
    ids = inputs["input_ids"][:1]
    ids[0, 1:5] = config.image_token_id
    return {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _phrases(size: Size, config: Any) -> Inputs:
    """Return phrases, each with a full stop behind it, and an image in which to find them."""
    ids = torch.tensor([[101, 1037, 500, 1012, 900, 1012, 102, 30]])
    return {
        "pixel_values": torch.randn(1, 3, size.side, size.side),
        "input_ids": ids,
        "token_type_ids": torch.zeros_like(ids),
        "attention_mask": torch.ones_like(ids),
        "pixel_mask": torch.ones(1, size.side, size.side, dtype=torch.long),
    }


KINDS: dict[str, Callable[[Size, Any], Inputs]] = {
    name.removeprefix("_"): function
    for name, function in list(globals().items())
    if name.startswith("_") and inspect.isfunction(function) and name not in {"_ids"}
}


@dataclass(frozen=True)
class Client:
    """A class of transformers, and how a small model of it is made.

    Attributes:
        name: Of the class.
        kind: Of its inputs: a key of ``KINDS``.
        settings: Of its configuration, and of those of its parts.
    """

    name: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> Any:
        """Return a small model with random weights."""
        kind = getattr(transformers, self.name)
        torch.manual_seed(0)
        config = small_config(kind.config_class, {**SMALL_SIZES, **_SIZES, **self.settings})
        model = kind(config).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                # Results of about 1, so that a wrong one shows.
                torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
        return model

    def inputs(self, size: Size, config: Any) -> Inputs:
        """Return inputs of a size."""
        torch.manual_seed(size.batch + size.length)
        return KINDS[self.kind](size, config)


_SIZES: dict[str, Any] = {"num_key_value_heads": 2, "dropout": 0.0, "sliding_window": 64}
# A kind of inputs, classes, and settings of their configurations; exir fails on the first part.
_CLASSES = """
image: SwinModel Swinv2Model DonutSwinModel {"embed_dim": 16, "depths": [2, 2], "num_heads": [2,
    4], "window_size": 4, "patch_size": 2, "image_size": 32}
image: Swin2SRModel {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
    "patch_size": 1, "image_size": 16}
image: EfficientNetModel {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.2,
    "hidden_dim": 320}
text: BigBirdModel {"attention_type": "original_full"}
text: JetMoeForCausalLM SplinterForQuestionAnswering
text: JambaForCausalLM {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_experts": 4, "use_mamba_kernels": false, "mamba_d_state": 8,
    "mamba_dt_rank": 4}
text: Qwen3NextForCausalLM {"layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "num_experts": 4}
text_only: MambaForCausalLM FalconMambaForCausalLM {"state_size": 8, "time_step_rank": 4}
video: TimesformerModel VideoMAEModel {"num_frames": 4, "image_size": 32, "tubelet_size": 2}
video: VJEPA2Model {"frames_per_clip": 4, "crop_size": 32, "tubelet_size": 2, "pred_hidden_size":
    32, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 2}
frames: Wav2Vec2BertModel {"feature_projection_input_dim": 16}

text: BertModel RobertaModel AlbertModel DistilBertModel ElectraModel DebertaV2Model MPNetModel
    XLMRobertaModel ModernBertModel FNetModel ConvBertModel NystromformerModel GPT2LMHeadModel
    GPTNeoXForCausalLM OPTForCausalLM LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM
    Qwen3ForCausalLM Gemma2ForCausalLM PhiForCausalLM BloomForCausalLM MixtralForCausalLM
    Qwen2MoeForCausalLM OlmoeForCausalLM XGLMForCausalLM
boxes: LayoutLMModel
translation: T5ForConditionalGeneration BartModel MarianMTModel PegasusModel MBartModel
image: ViTModel DeiTModel BeitModel Dinov2Model UperNetForSemanticSegmentation
    DetrForObjectDetection
image: YolosModel {"image_size": [32, 32]}
image: ConvNextModel ConvNextV2Model {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages":
    2}
image: ResNetModel RegNetModel {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
image: MobileNetV1Model MobileNetV2Model {"depth_multiplier": 0.25}
image: SegformerForSemanticSegmentation {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32,
    64], "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 32}
image: PvtModel {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 64], "num_attention_heads":
    [1, 2, 2, 4], "image_size": 32}
image: DPTForDepthEstimation {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [16, 16, 32, 32], "fusion_hidden_size": 32, "image_size": 32,
    "patch_size": 16}
text_and_image: CLIPModel SiglipModel {"projection_dim": 32}
image_tokens: LlavaForConditionalGeneration {"image_token_index": 299, "text_config":
    {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}, "vision_config":
    {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 16,
    "projection_dim": 32}}
patches: Siglip2VisionModel {"num_patches": 16, "patch_size": 4}
text_and_patches: Lfm2VlForConditionalGeneration {"image_token_id": 299, "downsample_factor": 2,
    "projector_hidden_size": 32, "text_config": {"model_type": "lfm2", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "layer_types": ["full_attention", "conv"]},
    "vision_config": {"model_type": "siglip2_vision_model", "hidden_size": 64, "num_hidden_layers":
    2, "intermediate_size": 96, "num_attention_heads": 4, "num_patches": 16, "patch_size": 4}}
phrases: GroundingDinoForObjectDetection {"backbone_config": {"model_type": "swin", "image_size":
    32, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "window_size": 2,
    "patch_size": 2, "out_indices": [2, 3, 4]}, "vocab_size": 1200, "encoder_layers": 1,
    "decoder_layers": 2, "num_queries": 10, "num_feature_levels": 3, "max_text_len": 16}
waveform: Wav2Vec2Model HubertModel WavLMModel SEWModel Data2VecAudioModel Wav2Vec2ConformerModel
speech_to_text: WhisperForConditionalGeneration {"max_source_positions": 16}
spectrogram: ASTModel {"max_length": 32}
series: PatchTSTModel PatchTSMixerModel {"context_length": 32, "num_input_channels": 3,
    "patch_length": 8}
"""


def _clients() -> Iterator[Client]:
    for line in _CLASSES.replace("\n    ", " ").split("\n"):
        kind, _, rest = line.partition(": ")
        names, brace, settings = rest.partition("{")
        for name in names.split():
            yield Client(name, kind, json.loads(brace + settings or "{}"))


CLIENTS: dict[str, Client] = {client.name: client for client in _clients()}

"""Models of every kind that users export, as data: how to build, call and vary them."""

from tests.interop.zoo import (
    audio,
    control_flow,
    decoders,
    detection,
    dtypes,
    dynamic,
    generative,
    graphs,
    language,
    layouts,
    outputs,
    recurrent,
    state,
    video,
    vision,
)
from tests.interop.zoo.model import Model

MODELS: tuple[Model, ...] = (
    *vision.MODELS,
    *detection.MODELS,
    *video.MODELS,
    *generative.MODELS,
    *audio.MODELS,
    *language.MODELS,
    *decoders.MODELS,
    *recurrent.MODELS,
    *graphs.MODELS,
    *dynamic.MODELS,
    *state.MODELS,
    *control_flow.MODELS,
    *dtypes.MODELS,
    *layouts.MODELS,
    *outputs.MODELS,
)

__all__ = ["MODELS", "Model"]

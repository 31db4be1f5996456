"""Models of every kind that users export, as data: how to build, call and vary them."""

from tests.interop.zoo import (
    control_flow,
    dtypes,
    dynamic,
    language,
    layouts,
    outputs,
    recurrent,
    state,
    vision,
)
from tests.interop.zoo.model import Model

MODELS: tuple[Model, ...] = (
    *vision.MODELS,
    *language.MODELS,
    *recurrent.MODELS,
    *dynamic.MODELS,
    *state.MODELS,
    *control_flow.MODELS,
    *dtypes.MODELS,
    *layouts.MODELS,
    *outputs.MODELS,
)

__all__ = ["MODELS", "Model"]

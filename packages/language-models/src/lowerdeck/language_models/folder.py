"""Load a Hugging Face model folder: decoder, tokenizer and vocabulary."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from lowerdeck.language_models.errors import FolderError, UnsupportedModelError, first_line
from lowerdeck.language_models.stored import keep_stored

TOKENIZER = "tokenizer.json"
# Never download and never run code of the folder; by default transformers would prompt.
_TRUSTED: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by their names in safetensors."""


class Vocabulary(NamedTuple):
    """Token ids that a runner needs.

    Attributes:
        size: Number of tokens with logits.
        bos: First token of each text, or None.
        eos: Tokens that end a text.
    """

    size: int
    bos: int | None
    eos: tuple[int, ...]


def load_folder(folder: Path, *, mapped: bool = False) -> PreTrainedModel:
    """Load the decoder model of a Hugging Face folder, in evaluation mode; it computes in float32.

    Nothing is downloaded, and no code of the folder runs.

    Args:
        folder: Contains ``config.json`` and weights in one or more safetensors files.
        mapped: Whether float16 or bfloat16 weights of linear layers and embeddings may stay
            memory-mapped in their dtype.

    Raises:
        FolderError: The folder has no model that can be loaded.
        UnsupportedModelError: transformers has no decoder of that kind.
    """
    config = load_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise FolderError(
            f"{folder} has no *.safetensors, expected the weights of the model: save it with "
            "save_pretrained"
        )
    stored = _stored_dtype(folder) if mapped else None
    if stored is not None:
        model = _loaded(folder, config, stored)
        if not _has_computed(stored, model):
            keep_stored(model)
            model.config.dtype = torch.float32
            return model
        del model
        config = load_config(folder)
    return _loaded(folder, config, torch.float32)


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return float16 or bfloat16 if all weights of a folder have that dtype, or None."""
    dtypes: set[str] = set()
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                dtypes |= {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    except Exception:
        return None  # transformers reports the error
    return _HALVES.get(dtypes.pop()) if len(dtypes) == 1 else None


def _has_computed(dtype: torch.dtype, model: PreTrainedModel) -> bool:
    """Return whether a model has tensors of this dtype that are not loaded from its files.

    Such tensors, like the factor of Gemma's embedding, were rounded when the model was built.
    """
    read = {*model.state_dict()}
    computed = [buffer for name, buffer in model.named_buffers() if name not in read]
    for module in model.modules():
        computed += [
            buffer for buffer in vars(module).values() if isinstance(buffer, torch.Tensor)
        ]
    return any(buffer.dtype == dtype for buffer in computed)


def _loaded(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **_TRUSTED,
        )
    except ValueError as error:
        raise UnsupportedModelError(
            f"{folder} holds a {config.model_type!r} model, which transformers cannot load as a "
            f"causal language model: {first_line(error)}"
        ) from error
    except Exception as error:
        raise FolderError(
            f"{folder} cannot be loaded ({type(error).__name__}: {first_line(error)}): is it "
            "complete?"
        ) from error
    _check_whole(folder, model, loading_info)
    loaded: PreTrainedModel = model
    return loaded.eval()


def _check_whole(
    folder: Path, model: PreTrainedModel, loading_info: Mapping[str, Collection[object]]
) -> None:
    """Check that no weight is missing: transformers only logs it and draws random numbers."""
    missing = sorted(map(str, loading_info["missing_keys"]))
    saved = next(iter(model.config.architectures or ()), None)
    if missing and saved not in {None, type(model).__name__}:
        raise FolderError(
            f"{folder} holds a {saved}, which lacks {len(missing)} weights of a model that "
            f"generates text ({type(model).__name__}), such as {missing[0]!r}: give the folder of "
            "a causal language model"
        )
    if missing:
        raise FolderError(
            f"{folder} lacks {len(missing)} weights of its model, such as {missing[0]!r}: are "
            "all its *.safetensors present, and is config.json of the same model?"
        )


def load_config(folder: Path) -> PretrainedConfig:
    """Return the configuration of a folder.

    Raises:
        FolderError: The folder has no configuration, or transformers does not support its model.
    """
    if not (folder / "config.json").is_file():
        raise FolderError(
            f"{folder} has no config.json, expected a folder from save_pretrained of transformers"
        )
    try:
        return AutoConfig.from_pretrained(folder, **_TRUSTED)
    except Exception as error:
        raise FolderError(
            f"{folder / 'config.json'} is not of a model that the installed transformers "
            "supports: "
            f"{first_line(error)}"
        ) from error


def vocabulary_of(model: PreTrainedModel) -> Vocabulary:
    """Return the token ids that a runner needs.

    Args:
        model: A decoder; its generation config takes precedence over its config.

    Raises:
        FolderError: An entry is not a token id.
    """
    text, generation = model.config.get_text_config(), model.generation_config

    def setting_of(name: str) -> Any:
        setting = getattr(generation, name, None)
        return getattr(text, name, None) if setting is None else setting

    eos = setting_of("eos_token_id")
    eos_tokens = eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
    if not all(isinstance(token, int) for token in eos_tokens):
        raise FolderError(
            f"eos_token_id of the model's configuration is {eos!r}, expected a token id or a "
            "list of them: correct generation_config.json or config.json"
        )
    return Vocabulary(text.vocab_size, setting_of("bos_token_id"), tuple(map(int, eos_tokens)))


def tokenizer_json(folder: Path) -> str:
    """Return the tokenizer of a folder as the text of a ``tokenizer.json``.

    Args:
        folder: Contains ``tokenizer.json``, or another tokenizer that transformers can convert.

    Raises:
        FolderError: The folder has no such tokenizer.
    """
    file = folder / TOKENIZER
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        try:
            json.loads(text)
        except ValueError as error:
            raise FolderError(f"{file} is not JSON ({error}): download it again") from error
        return text
    try:
        fast = AutoTokenizer.from_pretrained(folder, **_TRUSTED)
        return str(fast.backend_tokenizer.to_str())
    except Exception as error:
        raise FolderError(
            f"{folder} has no {TOKENIZER}, nor another tokenizer that transformers can convert "
            f"({first_line(error)}): copy the tokenizer's files into it"
        ) from error

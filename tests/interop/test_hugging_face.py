"""transformers' exporter with Lowerdeck as its engine, run by transformers' own runner."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lowerdeck_zoo import assert_close, official
from tests.clients.classes import CLIENTS, EXPORTED

pytest.importorskip("transformers.exporters")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]


def tensors(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(dict(value) if hasattr(value, "items") else value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_export_is_run_saved_and_loaded_by_transformers(dynamic: bool, tmp_path: Path) -> None:
    from transformers.exporters import ExecutorchConfig
    from transformers.exporters.base import ExportedModel

    from lowerdeck.exir_compat.hugging_face import LowerdeckExporter

    client = CLIENTS["BertModel"]
    model = client.model()
    inputs = client.inputs(EXPORTED, model.config)
    exporter = LowerdeckExporter(bounds=64 if dynamic else None)
    exported = exporter.export(model, dict(inputs), ExecutorchConfig(dynamic=dynamic))
    exported.save_pretrained(tmp_path)
    calls = [inputs]
    if dynamic:
        calls.append({name: value[:1, :7] for name, value in inputs.items()})
    for call in calls:
        with torch.no_grad():
            expected = tensors(model(**call))
        assert_close(tensors(exported(**call)), expected, atol=1e-4, rtol=1e-3)
        loaded = ExportedModel.from_pretrained(tmp_path)
        assert_close(tensors(loaded(**call)), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MambaForCausalLM"])
def test_each_stage_of_generation_equals_eager(name: str, dynamic: bool) -> None:
    from transformers import GenerationConfig
    from transformers.exporters import ExecutorchConfig
    from transformers.exporters.utils import decompose_for_generation

    from lowerdeck.exir_compat.hugging_face import LowerdeckExporter

    client = CLIENTS[name]
    model = client.model()
    inputs = client.inputs(EXPORTED, model.config)
    settings = {
        "generation_config": GenerationConfig(
            max_new_tokens=4, max_length=None, pad_token_id=0, eos_token_id=None
        )
    }
    exporter = LowerdeckExporter(bounds=64 if dynamic else None)
    config = ExecutorchConfig(dynamic=dynamic)
    exported = exporter.export_for_generation(model, dict(inputs), config, **settings)
    stages = decompose_for_generation(model, dict(inputs), **settings)
    assert set(exported.runners) == set(stages)
    for stage, (submodel, arguments) in stages.items():
        with torch.no_grad():
            expected = submodel(**copy.deepcopy(arguments)).logits
        result = exported.runners[stage](**copy.deepcopy(arguments)).logits
        assert_close([result], [expected], atol=1e-4, rtol=1e-3)


def test_another_backend_needs_partitioners() -> None:
    from transformers.exporters import ExecutorchConfig

    from lowerdeck.exir_compat import SettingError
    from lowerdeck.exir_compat.hugging_face import LowerdeckExporter

    client = CLIENTS["BertModel"]
    model = client.model()
    inputs = client.inputs(EXPORTED, model.config)
    with pytest.raises(SettingError, match="found backend 'cuda'; expected 'xnnpack'"):
        LowerdeckExporter().export(model, inputs, ExecutorchConfig(backend="cuda"))

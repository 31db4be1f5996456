"""``lowerdeck lower --quantize``: what a backend offers, samples, accuracy, errors in one line."""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered_helpers import install, lowerdeck

from lowerdeck.lowered_module.inspect.accuracy import accuracy_of
from lowerdeck.lowered_module.testing import RunPartitioner

MODEL = """
import torch

def example():
    layer = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(layer.weight, 0.13)
    torch.nn.init.constant_(layer.bias, 0.02)
    return layer, (torch.ones(1, 2),)

def samples():
    yield torch.ones(1, 2)
    yield (torch.zeros(1, 2),)
    yield {"input": torch.zeros(1, 2)}

def of_another_shape():
    return [(torch.ones(1, 3),)]

def none():
    return []

def tensor():
    return torch.ones(1, 2)

def fails():
    raise KeyError("gone")

def large():
    torch.manual_seed(0)
    table, layer = torch.nn.Embedding(100, 16), torch.nn.Linear(16, 16)
    return torch.nn.Sequential(table, layer), (torch.tensor([3, 5]),)

number = 3
"""


class Rounds:
    """Rounds the weights to tenths; delegates nothing, so that the portable kernels run it."""

    modes = {"tenths": "weights of one digit", "missing": "what is not installed"}  # noqa: RUF012
    calibrated = frozenset({"tenths"})

    def quantize(self, mode: str, module: Any, args: Any, kwargs: Any, samples: Any) -> Any:
        if mode == "missing":
            raise ModuleNotFoundError("this needs tenths: pip install tenths")
        changed = copy.deepcopy(module)
        for sample, named in samples:
            changed(*sample, **named)
        for parameter in changed.parameters():
            parameter.data = (parameter * 10).round() / 10
        exported = torch.export.export(changed, args, kwargs)
        return exported, RunPartitioner(lambda node: False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rounded_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    install(monkeypatch, "lowerdeck.quantizations", {"Tenths": Rounds})
    return tmp_path


WORDS = ("lower", "rounded_model:example", "--backend", "Tenths", "--quantize")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--calibrate", "rounded_model:samples"), "with 3 samples"),
        ((), "with only the example inputs"),
    ],
)
def test_it_prints_how_far_each_output_is_from_the_model(
    folder: Path, words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lowerdeck(*WORDS, "tenths", *words) == 0
    text = capsys.readouterr().out
    assert f"calibrated     {told}" in text
    if importlib.util.find_spec("lowerdeck.runner") is not None:
        # Two weights become 0.1 and the bias 0.
        numbers = "output 0: max 0.08 (relative 0.29), mean 0.08, cosine 1.000000\n"
        assert f"from float     {numbers}" in text


def test_it_names_the_weights_that_stay_float(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("lower", "rounded_model:large", "--backend", "Tenths", "--quantize", "tenths")
    assert lowerdeck(*words) == 0
    text = capsys.readouterr().out
    # Not the bias, which no mode of any backend makes an integer of fewer bits.
    assert [line for line in text.splitlines() if line.startswith("stays float")] == [
        "stays float    0.weight: 6.40 kB: aten.embedding.default is not quantised",
        "stays float    1.weight: 1.02 kB: aten.linear.default is not quantised",
    ]
    assert "warning        --quantize tenths leaves 7.42 kB of 7.49 kB of weights in float" in text


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (
            ("no-such",),
            2,
            r"found the mode 'no-such', expected a mode of Tenths: tenths \(weights of",
        ),
        (("missing",), 4, "--quantize missing: this needs tenths: pip install tenths"),
        (("missing", "--calibrate", "rounded_model:samples"), 2, "uses no samples"),
        (("tenths", "--calibrate", "rounded_model:gone"), 3, "--calibrate 'rounded_model:gone': "),
        (("tenths", "--calibrate", "rounded_model:number"), 3, "is a int, expected a function"),
        (("tenths", "--calibrate", "rounded_model:tensor"), 3, "returned a Tensor, expected"),
        (("tenths", "--calibrate", "rounded_model:none"), 3, "returned nothing, expected"),
        (("tenths", "--calibrate", "rounded_model:fails"), 3, "raised KeyError: 'gone'; expected"),
        (
            ("tenths", "--calibrate", "rounded_model:of_another_shape"),
            3,
            "--quantize tenths failed: RuntimeError: .*fit the model",
        ),
    ],
)
def test_what_cannot_be_quantised_is_one_line_of_error(
    folder: Path,
    words: tuple[str, ...],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lowerdeck(*WORDS, *words) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert not list(folder.glob("*.pte"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--quantize", "tenths"), "needs a --backend with quantisation; installed: Tenths"),
        (("--calibrate", "rounded_model:samples"), "needs --quantize"),
    ],
)
def test_wrong_arguments_are_told_before_a_model_is_made(
    folder: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lowerdeck("lower", "no_such_model:example", *words) == 2
    assert message in capsys.readouterr().err


def test_outputs_that_are_not_numbers_or_differ_in_shape_are_as_far_as_can_be() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0])
    (same,) = accuracy_of([nan], [nan.clone()])
    assert (same.largest, same.mean) == (0.0, 0.0)
    far = accuracy_of([nan, one, one[:1], 3], [one, one, one, 4])
    assert [found.largest for found in far] == [float("inf"), 0.0, float("inf"), float("inf")]
    (alone,) = accuracy_of([one], [])
    assert alone.largest == float("inf")
    (opposite,) = accuracy_of([-one], [one])
    assert opposite.cosine == pytest.approx(-1)


def test_complex_numbers_are_compared_whole_and_infinities_by_place() -> None:
    one = torch.tensor([3 + 4j, 1 - 2j])
    (imaginary,) = accuracy_of([one + 2j], [one])
    assert imaginary.largest == pytest.approx(2)
    assert accuracy_of([one.conj()], [one])[0].largest == pytest.approx(8)
    assert accuracy_of([one.real], [one])[0].largest == float("inf")
    inf = torch.tensor([float("inf"), 2.0])
    (same,) = accuracy_of([inf + torch.tensor([0.0, 0.5])], [inf])
    assert same.largest == 0.5
    assert same.cosine == pytest.approx(1)
    assert accuracy_of([-inf], [inf])[0].largest == float("inf")

"""Models quantised by torchao's pt2e flow, exported again, in both modes."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")

from torch import nn  # noqa: E402

from lowerdeck.unflatten import unflatten  # noqa: E402

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.fc(torch.relu(self.bn(self.conv(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_quantised_model_keeps_its_hierarchy(strict, dynamic):
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    torch.manual_seed(0)
    eager, x = Net().eval(), torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        flat = torch.export.export(copy.deepcopy(eager), (x,), strict=strict).module()
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
        prepared = prepare_pt2e(flat, quantizer)
        prepared(x)
        converted = convert_pt2e(prepared)
        program = torch.export.export(converted, (x,), strict=strict)
        for form in (program, program.run_decompositions()):
            module = unflatten(form)
            expected = form.module()(x)
            for _ in range(2):
                torch.testing.assert_close(module(x), expected)
            torch.testing.assert_close(copy.deepcopy(module)(x), expected)
            assert list(module.state_dict()) == list(converted.state_dict())
            # ExportedProgram.module() adds this one to what is exported again.
            names = {name for name, _ in module.named_modules()} - {"_guards_fn"}
            # Norms are folded into the convolutions before them.
            gone = {
                name for name, child in eager.named_modules() if "Norm" in type(child).__name__
            }
            assert names == {name for name, _ in eager.named_modules()} - gone

"""``lowerdeck ops --yaml`` says what ExecuTorch's own tool derives from the same file."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch

from lowerdeck.emitter import emit
from lowerdeck.script import main

yaml = pytest.importorskip("yaml")
pytest.importorskip("executorch.codegen.tools.selective_build")
gen_oplist = pytest.importorskip("executorch.codegen.tools.gen_oplist")

CORPUS = sorted((Path(__file__).resolve().parents[1] / "interop").glob("corpus*/*.pte"))
pytestmark = pytest.mark.filterwarnings("ignore")


class Many(torch.nn.Module):
    """Lists of tensors, optional ones too, several types, orders of dimensions, and a branch."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.convolution = torch.nn.Conv2d(3, 2, 3)

    def forward(self, x, index, image):
        y = self.linear(x)
        z = torch.cat([y, y * 2.5, x])
        taken = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        chosen = (z[index], z[:, index])
        wide = z.to(torch.float64) + 1
        return *chosen, taken, index + 1, z.split(4)[0].softmax(-1), wide, self.convolution(image)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    image = torch.randn(1, 3, 5, 5).to(memory_format=torch.channels_last)
    inputs = (torch.randn(4, 4), torch.tensor([0, 1]), image)
    program = torch.export.export(Many().eval(), inputs)
    path = tmp_path_factory.mktemp("many") / "many.pte"
    emit({"forward": program, "again": program}).save(path)
    return path


def ours(path):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(["ops", str(path), "--yaml"]) == 0
    return yaml.safe_load(shown.getvalue())


def peers(path, folder):
    with contextlib.redirect_stdout(io.StringIO()):
        gen_oplist.gen_oplist(output_path=str(folder / "ops.yaml"), model_file_path=str(path))
    return yaml.safe_load((folder / "ops.yaml").read_text())


def test_many_operators_are_told_as_exirs_tool_tells_them(many, tmp_path):
    found = ours(many)
    assert found == peers(many, tmp_path)
    # Types differ from call to call, so that a set of one is not what was compared.
    assert len(found["et_kernel_metadata"]["aten::add.Scalar_out"]) > 1


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_files_of_the_corpus_are_told_as_exirs_tool_tells_them(path, tmp_path):
    try:
        wanted = peers(path, tmp_path)
    except Exception:
        # The tool refuses to write a list without operators.
        assert not ours(path)["operators"]
        return
    assert ours(path) == wanted

#!/usr/bin/env bash
# executorch 1.4.1, torchao 0.18.0: linear layers of torchao's Int8DynamicActivationIntxWeightConfig with int4 weights and
# MappingType.ASYMMETRIC lower with XnnpackPartitioner to one delegate that computes as if all zero points were 0: the
# results are off by a fifth of their size and more. MappingType.SYMMETRIC is right. Nothing is refused or logged.
# A good engineer would expect a backend without zero points of weights to leave such a layer to other kernels.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip="$folder/env/bin/pip"
"$pip" install --quiet "torch==2.13.0" "numpy==2.4.6" "ruamel.yaml==0.18.16" "flatbuffers==25.12.19" "tabulate==0.9.0" "pyyaml==6.0.3" "pandas==2.3.3"
"$pip" install --quiet --no-deps "executorch==1.4.1" "torchao==0.18.0"
cat > "$folder/seen.py" <<'PYTHON'
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.extension.pybindings import _portable_lib


def on_device(function, *inputs):
    model = torch.nn.Module()
    model.forward = function
    program = torch.export.export(model.eval(), inputs)
    manager = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    file = manager.to_executorch().buffer
    return _portable_lib._load_for_executorch_from_buffer(file).forward(inputs)[0]


from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerAxis
from torchao.quantization.quant_primitives import MappingType

torch.manual_seed(0)
x = torch.randn(4, 64)
for kind in (MappingType.SYMMETRIC, MappingType.ASYMMETRIC):
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).eval()
    with torch.no_grad():
        layer[0].weight.add_(0.1)
    how = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerAxis(0), weight_mapping_type=kind
    )
    quantize_(layer, how)
    expected = layer(x).detach()
    result = on_device(lambda x: layer(x), x)
    share = float((result - expected).abs().max() / expected.abs().max())
    print(f"{kind.name}: error {'below 1 %' if share < 0.01 else 'above 20 %' if share > 0.2 else share}")
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(ASYMMETRIC\|SYMMETRIC\)") || { cat "$folder/log" >&2; exit 1; }
expected="SYMMETRIC: error below 1 %
ASYMMETRIC: error above 20 %"
echo "$seen"
[ "$seen" = "$expected" ]

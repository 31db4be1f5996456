#!/usr/bin/env bash
# executorch 1.4.1, torchao 0.18.0: a linear layer quantised with torchao's Int8WeightOnlyConfig and lowered with
# XnnpackPartitioner lowers and runs without an error, but the file does not multiply by the scales of the weight: its
# results are x @ int8_weight.T, here a thousand times too large. The multiplication (`mul` after `mm` in the exported
# program) is in the delegate's partition and not in its payload. Without the partitioner the file gives eager's numbers.
# A good engineer would expect a refusal, or a file that dequantises.
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
from torchao.quantization import Int8WeightOnlyConfig, quantize_

torch.manual_seed(0)
layer = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).eval()
x = torch.randn(2, 64)
quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
expected, unscaled = layer(x), x @ layer[0].weight.qdata.float().T
program = torch.export.export(layer, (x,))
for partitioners in ([], [XnnpackPartitioner()]):
    file = to_edge_transform_and_lower(program, partitioner=partitioners).to_executorch().buffer
    (result,) = _portable_lib._load_for_executorch_from_buffer(file).forward((x,))
    print(
        "XNNPACK:" if partitioners else "portable:",
        f"equals eager: {torch.allclose(result, expected, atol=1e-3)},",
        f"equals x @ int8_weight.T: {torch.allclose(result, unscaled, atol=1e-2)}",
    )
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "equals") || { cat "$folder/log" >&2; exit 1; }
expected="portable: equals eager: True, equals x @ int8_weight.T: False
XNNPACK: equals eager: False, equals x @ int8_weight.T: True"
echo "$seen"
[ "$seen" = "$expected" ]

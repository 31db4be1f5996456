#!/usr/bin/env bash
# openvino 2026.4.1 (2025.4.1 too), CPU: comparisons of i32 tensors are computed in float32, which has 24 bits. So
# 16777217 > 16777216 is false and 16777217 == 16777216 is true; their difference, an integer operator, is 1.
# A good engineer would expect integers to be compared as integers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip="$folder/env/bin/pip"
"$pip" install --quiet "openvino==2026.4.1" "numpy==2.3.5"
cat > "$folder/seen.py" <<'PYTHON'
import numpy
import openvino
import openvino.opset13 as op


def on_cpu(function, *inputs):
    parameters = [op.parameter(list(x.shape), x.dtype) for x in inputs]
    model = openvino.Model([function(*parameters)], parameters)
    core = openvino.Core()
    return core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(list(inputs))[0]


a, b = numpy.array([2**24 + 1], "int32"), numpy.array([2**24], "int32")
print("greater:", on_cpu(op.greater, a, b).tolist())
print("equal:", on_cpu(op.equal, a, b).tolist())
print("difference:", on_cpu(op.subtract, a, b).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(difference\|equal\|greater\)") || { cat "$folder/log" >&2; exit 1; }
expected="greater: [False]
equal: [True]
difference: [1]"
echo "$seen"
[ "$seen" = "$expected" ]

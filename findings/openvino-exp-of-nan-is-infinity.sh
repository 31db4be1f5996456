#!/usr/bin/env bash
# openvino 2026.4.1 (2025.4.1 too), CPU, float32: functions of NaN give numbers. exp(NaN) is infinity, relu(NaN) is 0 and
# the maximum of a row with a NaN is the largest number, so that a NaN in the input of a network may leave no trace in
# its output. numpy gives NaN for all three; openvino's own softmax does too, in the place of the NaN alone.
# A good engineer would expect NaN to propagate through arithmetic, as IEEE 754 functions do.
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


x = numpy.array([numpy.nan, 1.0, -1.0], "f")
print("exp:", on_cpu(op.exp, x)[0])
print("relu:", on_cpu(op.relu, x)[0])
print("reduce_max:", on_cpu(lambda x: op.reduce_max(x, op.constant([0])), x))
print("softmax:", [round(float(number), 2) for number in on_cpu(lambda x: op.softmax(x, 0), x)])
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(exp\|reduce_max\|relu\|softmax\)") || { cat "$folder/log" >&2; exit 1; }
expected="exp: inf
relu: 0.0
reduce_max: 1.0
softmax: [nan, 0.0, 0.0]"
echo "$seen"
[ "$seen" = "$expected" ]

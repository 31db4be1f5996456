#!/usr/bin/env bash
# openvino 2026.4.1 (2025.4.1 too), CPU: a model whose parameter, constant and result are i64 is computed in 32 bits. The
# result still has the type i64; 2147483649 + 1 is -2147483646. No error, no warning at conversion, compilation or call.
# A good engineer would expect 64-bit integers, or a refusal, where every tensor of the model says i64.
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


x = numpy.array([1, 2**31 + 1], "int64")
result = on_cpu(lambda x: op.add(x, op.constant(numpy.int64(1))), x)
print("numpy:", (x + 1).tolist())
print("openvino:", result.dtype, result.tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(numpy\|openvino\)") || { cat "$folder/log" >&2; exit 1; }
expected="numpy: [2, 2147483650]
openvino: int64 [2, -2147483646]"
echo "$seen"
[ "$seen" = "$expected" ]

#!/usr/bin/env bash
# openvino 2025.4.1, CPU: a convolution whose input is a constant, transposed to (batch, length, channels) and multiplied
# by a constant matrix given as (out, in) with transpose_b, as nn.Conv1d before nn.Linear is, computes wrong numbers in
# float32. The same model with the constant as an input is right, and so is the constant one with the matrix given as
# (in, out). No error, no warning: the graph is folded at compile time.
# A good engineer would expect folding of constants to change nothing but rounding.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "openvino==2025.4.1" "numpy==2.3.5"
cat > "$folder/seen.py" <<'PYTHON'
import numpy
import openvino
import openvino.opset13 as op

rng = numpy.random.default_rng(0)
signal = numpy.arange(14, dtype="f").reshape(2, 1, 7)
kernel = rng.normal(size=(4, 1, 5)).astype("f")
matrix = rng.normal(size=(8, 4)).astype("f")

padded = numpy.pad(signal[:, 0], ((0, 0), (2, 2)))
windows = numpy.stack([padded[:, k : k + 7] for k in range(5)], -1)
expected = windows @ kernel[:, 0].T @ matrix.T


def result(constant, transpose_b):
    zero = op.parameter([1], numpy.float32)
    given = op.parameter([2, 1, 7], numpy.float32)
    source = op.constant(signal) if constant else given
    y = op.convolution(source, op.constant(kernel), [1], [2], [2], [1])
    y = op.transpose(y, op.constant([0, 2, 1]))
    weight = matrix if transpose_b else numpy.ascontiguousarray(matrix.T)
    y = op.matmul(y, op.constant(weight), False, transpose_b)
    model = openvino.Model([op.add(y, zero)], [zero] if constant else [zero, given])
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled([numpy.zeros(1, "f")] + ([] if constant else [signal]))[0]


for constant in (False, True):
    for transpose_b in (False, True):
        error = abs(result(constant, transpose_b) - expected).max()
        verdict = "right" if error < 1e-3 else "wrong" if error > 1 else "unclear"
        print(f"constant={constant}, transpose_b={transpose_b}: {verdict}")
PYTHON
seen=$("$folder/env/bin/python" "$folder/seen.py")
expected='constant=False, transpose_b=False: right
constant=False, transpose_b=True: right
constant=True, transpose_b=False: right
constant=True, transpose_b=True: wrong'
echo "$seen"
[ "$seen" = "$expected" ]

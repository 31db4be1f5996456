#!/usr/bin/env bash
# openvino 2026.4.1, CPU: `Divide` of integers, whose attribute m_pythondiv is True and so asks for Python's floor
# division, truncates at run time: -7 / 2 is -3. The same division of constants is folded at compile time and floors: -4.
# A converted `x // 2` of torch 2.13.0 is this Divide, and `x % 2` floors, so that 2 * (x // 2) + x % 2 is not x.
# A good engineer would expect the attribute to hold at run time, and folding to change no number.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "openvino==2026.4.1" "numpy==2.3.5" "packaging==26.0"
cat > "$folder/seen.py" <<'PYTHON'
import numpy
import openvino
import openvino.opset13 as op
import torch

x = numpy.array([-7, -3, -1, 0, 7], "int32")


def on_cpu(model, *inputs):
    return openvino.compile_model(model, "CPU")(list(inputs))[0].tolist()


given, zero = op.parameter([5], numpy.int32), op.parameter([5], numpy.int32)
divide = op.divide(given, op.constant(numpy.int32(2)))
folded = op.divide(op.constant(x), op.constant(numpy.int32(2)))
print("m_pythondiv:", divide.get_attributes()["m_pythondiv"], folded.get_attributes()["m_pythondiv"])
print("numpy, x // 2:", (x // 2).tolist())
print("openvino, Divide of a parameter:", on_cpu(openvino.Model([divide], [given]), x))
print("openvino, Divide of a constant:", on_cpu(openvino.Model([op.add(folded, zero)], [zero]), 0 * x))


class Parts(torch.nn.Module):
    def forward(self, x):
        return x // 2, x % 2


program = torch.export.export(Parts(), (torch.from_numpy(x),))
quotient, rest = openvino.compile_model(openvino.convert_model(program), "CPU")(x).values()
print("openvino, 2 * (x // 2) + x % 2 of torch:", (2 * quotient + rest).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(m_pythondiv\|numpy\|openvino\)") || { cat "$folder/log" >&2; exit 1; }
expected="m_pythondiv: True True
numpy, x // 2: [-4, -2, -1, 0, 3]
openvino, Divide of a parameter: [-3, -1, 0, 0, 3]
openvino, Divide of a constant: [-4, -2, -1, 0, 3]
openvino, 2 * (x // 2) + x % 2 of torch: [-5, -1, 1, 0, 7]"
echo "$seen"
[ "$seen" = "$expected" ]

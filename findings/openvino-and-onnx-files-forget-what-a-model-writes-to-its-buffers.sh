#!/usr/bin/env bash
# torch 2.13.0 with openvino 2026.4.1, and with onnxscript 0.7.2, onnx 1.23.2, onnxruntime 1.32.0: a program that counts
# its calls in a buffer converts with `openvino.convert_model` and `torch.onnx.export(dynamo=True)` to files that give the
# numbers of the first call each time, where `program.module()` counts. OpenVINO has variables for state, and its model
# has none; the ONNX file has no second output that would carry the new value. No error, no warning of the buffer.
# A good engineer would expect a state, an output or a refusal; a test that calls the file once passes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip="$folder/env/bin/pip"
"$pip" install --quiet "torch==2.13.0" "openvino==2026.4.1" "numpy==2.3.5" "packaging==26.0"
"$pip" install --quiet "onnx==1.23.2" "onnxscript==0.7.2" "onnxruntime==1.32.0" "numpy==2.3.5"
cat > "$folder/seen.py" <<'PYTHON'
import contextlib
import io
import warnings

import onnxruntime
import openvino
import torch


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(5.0))

    def forward(self, x):
        self.calls.add_(1)
        return x + self.calls


x = torch.zeros(1)
program = torch.export.export(Counter(), (x,))
with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
    warnings.simplefilter("always")
    converted = openvino.convert_model(program)
    file = torch.onnx.export(program, dynamo=True).model_proto
print("warnings of buffers:", [str(one.message) for one in caught if "buffer" in str(one.message)])
print("variables of openvino:", len(converted.get_variables()), "outputs of onnx:", len(file.graph.output))

module = program.module()
request = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
session = onnxruntime.InferenceSession(file.SerializeToString())
name = session.get_inputs()[0].name
print("three calls, torch:", [module(x).item() for _ in range(3)])
print("three calls, openvino:", [request.infer([x.numpy()])[0].item() for _ in range(3)])
print("three calls, onnxruntime:", [session.run(None, {name: x.numpy()})[0].item() for _ in range(3)])
PYTHON
seen=$("$folder/env/bin/python" "$folder/seen.py" 2> "$folder/log" | grep "^\(warnings\|variables\|three\)") || { cat "$folder/log" >&2; exit 1; }
expected="warnings of buffers: []
variables of openvino: 0 outputs of onnx: 1
three calls, torch: [6.0, 7.0, 8.0]
three calls, openvino: [6.0, 6.0, 6.0]
three calls, onnxruntime: [6.0, 6.0, 6.0]"
echo "$seen"
[ "$seen" = "$expected" ]

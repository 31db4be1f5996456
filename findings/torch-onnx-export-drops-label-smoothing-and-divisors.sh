#!/usr/bin/env bash
# torch 2.13.0, onnxscript 0.7.2, onnx 1.23.2, onnxruntime 1.32.0: `torch.onnx.export(dynamo=True)` takes programs with
# the options `label_smoothing` of cross entropy and `divisor_override` of average pooling, and writes files without
# them: the loss is the one without smoothing, the pool divides by the size of its window. No error, no warning.
# A good engineer would expect a ConversionError, as for any operator that has no translation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "onnx==1.23.2" "onnxscript==0.7.2" "onnxruntime==1.32.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import contextlib
import io

import onnxruntime
import torch


def in_runtime(model, *inputs):
    with contextlib.redirect_stdout(io.StringIO()):
        file = torch.onnx.export(model.eval(), inputs, dynamo=True).model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(file)
    names = [x.name for x in session.get_inputs()]
    return session.run(None, {name: x.numpy() for name, x in zip(names, inputs)})[0]


logits, label, image = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]), torch.ones(1, 1, 2, 2)
for name, model, plain, inputs in (
    ("smoothed loss", torch.nn.CrossEntropyLoss(label_smoothing=0.3), torch.nn.CrossEntropyLoss(), (logits, label)),
    ("sum in windows", torch.nn.AvgPool2d(2, divisor_override=1), torch.nn.AvgPool2d(2), (image,)),
):
    torch_s, without = model(*inputs).item(), plain(*inputs).item()
    file_s = in_runtime(model, *inputs).item()
    print(f"{name}: torch {torch_s:.3f}, torch without the option {without:.3f}, file {file_s:.3f}")
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "torch without") || { cat "$folder/log" >&2; exit 1; }
expected="smoothed loss: torch 0.640, torch without the option 0.240, file 0.240
sum in windows: torch 4.000, torch without the option 1.000, file 1.000"
echo "$seen"
[ "$seen" = "$expected" ]

#!/usr/bin/env bash
# openvino 2026.4.1, torch 2.13.0: an `nn.EmbeddingBag` with padding_idx converts and runs as if it had none: the row of
# the padding index is added to sums, and counted in means. No error, no warning; mode "max" is refused.
# A good engineer would expect an option that changes the result to be converted or refused, as "max" is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "openvino==2026.4.1" "numpy==2.3.5" "packaging==26.0"
cat > "$folder/seen.py" <<'PYTHON'
import openvino
import torch

weight = torch.tensor([[1.0], [10.0], [100.0]])
bags = torch.tensor([[0, 1], [2, 1], [0, 2]])
for mode in ("sum", "mean"):
    model = torch.nn.EmbeddingBag.from_pretrained(weight, mode=mode, padding_idx=1).eval()
    without = torch.nn.EmbeddingBag.from_pretrained(weight, mode=mode).eval()
    converted = openvino.convert_model(torch.export.export(model, (bags,)))
    seen = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(bags.numpy())[0]
    print(f"{mode}, torch:", model(bags).flatten().tolist())
    print(f"{mode}, torch without padding_idx:", without(bags).flatten().tolist())
    print(f"{mode}, openvino:", seen.flatten().tolist())
model = torch.nn.EmbeddingBag.from_pretrained(weight, mode="max", padding_idx=1).eval()
try:
    openvino.convert_model(torch.export.export(model, (bags,)))
except Exception as error:
    print("max:", "refused" if "embedding_bag" in str(error) else error)
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(sum\|mean\|max\)") || { cat "$folder/log" >&2; exit 1; }
expected="sum, torch: [1.0, 100.0, 101.0]
sum, torch without padding_idx: [11.0, 110.0, 101.0]
sum, openvino: [11.0, 110.0, 101.0]
mean, torch: [1.0, 100.0, 50.5]
mean, torch without padding_idx: [5.5, 55.0, 50.5]
mean, openvino: [5.5, 55.0, 50.5]
max: refused"
echo "$seen"
[ "$seen" = "$expected" ]

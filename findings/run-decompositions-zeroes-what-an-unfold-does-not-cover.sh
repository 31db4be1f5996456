#!/usr/bin/env bash
# torch 2.13.0: a write through x.unfold(...) sets all elements of x to 0 that lie in no window, once the program is
# functional: after ExportedProgram.run_decompositions, and in torch.compile (pytorch issue 198102). Eager and the
# program straight from torch.export leave them as they are; nothing warns. Functionalization writes a view back by
# the view's gradient formula, and the gradient of elements that nothing reads is 0.
# A good engineer would expect that, as with slices, selects and diagonals, only written elements change.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import torch


class Windows(torch.nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, x):
        y = x.clone()
        y.unfold(0, 2, self.step).mul_(10)
        return y


x = torch.arange(1.0, 8.0)
for step in (3, 2):
    model = Windows(step)
    program = torch.export.export(model, (x,))
    compiled = torch.compile(model, backend="aot_eager")
    print("step", step)
    print("  eager:", model(x).tolist())
    print("  exported:", program.module()(x).tolist())
    print("  decomposed:", program.run_decompositions({}).module()(x).tolist())
    print("  compiled:", compiled(x).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py")
expected="step 3
  eager: [10.0, 20.0, 3.0, 40.0, 50.0, 6.0, 7.0]
  exported: [10.0, 20.0, 3.0, 40.0, 50.0, 6.0, 7.0]
  decomposed: [10.0, 20.0, 0.0, 40.0, 50.0, 0.0, 0.0]
  compiled: [10.0, 20.0, 0.0, 40.0, 50.0, 0.0, 0.0]
step 2
  eager: [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 7.0]
  exported: [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 7.0]
  decomposed: [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 0.0]
  compiled: [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 0.0]"
echo "$seen"
[ "$seen" = "$expected" ]

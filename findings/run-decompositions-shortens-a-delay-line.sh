#!/usr/bin/env bash
# torch 2.13.0, ExportedProgram.run_decompositions: a delay line of two buffers (older takes newer's value, then newer
# takes the input) forgets a step if `newer` was registered before `older`. Registered the other way round it is right,
# and so is the program before run_decompositions. No warning.
# A good engineer would expect that the order in which buffers are registered changes nothing: the signature says
# {'x': 'newer', 'b_newer': 'older'}, and the values written are those of before the call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import torch


class Delay(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_buffer(name, torch.zeros(1))

    def forward(self, x):
        delayed = self.older.clone()
        self.older.copy_(self.newer)
        self.newer.copy_(x)
        return delayed


def four_steps(module):
    return [module(torch.tensor([float(step)])).item() for step in (1, 2, 3, 4)]


def program(names):
    return torch.export.export(Delay(names), (torch.zeros(1),))


for names in (("older", "newer"), ("newer", "older")):
    print(*names)
    print("  eager", four_steps(Delay(names)))
    print("  exported", four_steps(program(names).module()))
    print("  decomposed", four_steps(program(names).run_decompositions().module()))
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py")
expected='older newer
  eager [0.0, 0.0, 1.0, 2.0]
  exported [0.0, 0.0, 1.0, 2.0]
  decomposed [0.0, 0.0, 1.0, 2.0]
newer older
  eager [0.0, 0.0, 1.0, 2.0]
  exported [0.0, 0.0, 1.0, 2.0]
  decomposed [0.0, 1.0, 2.0, 3.0]'
echo "$seen"
[ "$seen" = "$expected" ]

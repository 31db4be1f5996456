"""The bridge to the official runtime: ``python -m`` this, where ``executorch`` is installed.

The only module of this package that has it loaded, and only when run as a program.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lowerdeck.inspect import official_binding
from lowerdeck.language_models.generating import Timing, continued, inputs_of, method_for

LIBRARIES = (
    "extension/llm/custom_ops/libcustom_ops_aot_lib.so",
    "kernels/quantized/libquantized_ops_aot_lib.so",
)
"""What the wheel brings beside its kernels; applications link them where files need them."""


def main(asked: str) -> None:
    """Print the tokens that follow, each in a line, and then how long it took.

    Args:
        asked: In JSON: the file, the prompt, how many tokens, what ends a text, and the methods.
    """
    # The runtime prints where it likes; answers go where nothing else does.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    given: dict[str, Any] = json.loads(asked)
    binding = official_binding()
    root = Path(binding["__file__"]).parents[2]
    for library in LIBRARIES:
        if (root / library).is_file():
            load: Any = torch.ops.load_library
            load(str(root / library))
    # Not as a module, whose methods would each have a cache of their own.
    program = binding["_load_program"](given["path"])
    methods = {name: program.load_method(name) for name in given["methods"]}

    def step(tokens: Sequence[int], position: int) -> int:
        method = methods[method_for(tokens, methods)]
        (logits,) = method.call(inputs_of(tokens, position))
        return int(logits[0, -1].argmax())

    timing = Timing(f"the official ExecuTorch runtime ({_version()})")
    for token in continued(
        step, given["prompt"], given["count"], given["chunk"], given["ends"], timing
    ):
        print(token, file=answers)
    print(json.dumps(dataclasses.asdict(timing)), file=answers)


def _version() -> str:
    return version("executorch")


if __name__ == "__main__":
    main(sys.stdin.read())

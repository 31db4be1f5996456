"""Named test programs with inputs and tags, and helpers that the test suites share.

    @pytest.mark.parametrize("program", programs("stateful", "dynamic half"), ids=str)
    def test_emit(program: Program) -> None:
        emitted = emit(program.exports())

Importing it builds nothing. Each program is built, exported and run in eager once per process.
"""

from __future__ import annotations

from dataclasses import replace

from lowerdeck_zoo.checking import assert_close, exported, saved_and_loaded
from lowerdeck_zoo.models import (
    audio,
    complex_numbers,
    control_flow,
    decoders,
    detection,
    dtypes,
    dynamic,
    generative,
    graphs,
    kernel_limits,
    language,
    layers,
    layouts,
    libraries,
    memory,
    modes,
    names,
    outputs,
    quantised,
    recurrent,
    sizes,
    state,
    strides,
    transformers_small,
    video,
    vision,
)
from lowerdeck_zoo.program import Call, Holding, Method, Of, Program, Result, copied, drawn, normal

TAGS: dict[str, str] = {
    # By domain: the module that has the program.
    "audio": "waveforms, spectra, speech",
    "control-flow": "cond, while_loop, map or scan",
    "detection": "segmentation, detection and their postprocessing",
    "dtypes": "other types than float32, and mixes",
    "dynamic": "symbolic sizes, or sizes read from data",
    "generative": "decoders of images, diffusion",
    "graphs": "graph networks, sequence models, recommenders",
    "layers": "small stacks of layers, such as quantisers take",
    "language-model": "transformers on tokens and parts of them",
    "layouts": "channels-last, strides, views and indexing",
    "memory": "values whose memory may be used again, constants computed at emission",
    "modes": "regions of autocast and of no gradients",
    "names": "inputs, buffers and outputs named as Python's builtins",
    "outputs": "nested, repeated, constant or absent inputs and outputs",
    "recurrent": "LSTM, GRU, RNN",
    "stateful": "buffers written by a call and read by the next",
    "video": "volumes and sequences of images",
    "vision": "classification of images and similar networks",
    # By trait.
    "complex": "complex numbers inside",
    "half": "float16 or bfloat16",
    "in-place": "tensors are written in place",
    "large": "models of other libraries, which may take seconds to export",
    "timm": "a model of timm, where that is installed",
    "torchvision": "a model of torchvision, where that is installed",
    "transformers": "a small model of transformers, where that is installed",
    "quantised": "integer weights or quantised activations",
    "several-methods": "more than one exported method",
    "shared-weights": "a weight that is read twice or has two names",
}
"""Every tag and what it says of a program."""

_DOMAINS = (
    *(("vision", vision), ("detection", detection), ("video", video), ("generative", generative)),
    *(("layers", layers), ("audio", audio)),
    *(("language-model", language), ("language-model", decoders)),
    *(("recurrent", recurrent), ("graphs", graphs), ("dynamic", dynamic), ("dynamic", sizes)),
    *(("stateful", state), ("control-flow", control_flow), ("dtypes", dtypes)),
    *(("quantised", quantised), ("complex", complex_numbers), ("layouts", layouts)),
    *(
        ("layouts", strides),
        ("memory", memory),
        ("memory", kernel_limits),
        ("modes", modes),
        ("names", names),
    ),
    *(("outputs", outputs), ("", transformers_small), ("", libraries)),
)
# Of small programs that compute little, which all runtimes compute almost as eager does.
_PRECISE = {"atol": 1e-5, "rtol": 1e-5}
_SMALL = (control_flow, kernel_limits, memory, names, outputs, sizes, state, strides)
PROGRAMS: tuple[Program, ...] = tuple(
    replace(
        program,
        tags=f"{domain} {program.tags}".strip(),
        **(_PRECISE if module in _SMALL and program.has_usual_bounds else {}),
    )
    for domain, module in _DOMAINS
    for program in module.PROGRAMS
)
"""All programs, in a fixed order."""


def programs(*selections: str, without: str = "") -> list[Program]:
    """Return the programs of at least one selection.

    Args:
        selections: Each the tags that a program must all have, separated by blanks; none selects
            every program.
        without: Tags of which a program has none.
    """
    named = {tag for words in (*selections, without) for tag in words.split()}
    if unknown := named - TAGS.keys():
        raise ValueError(f"found the tags {sorted(unknown)}, expected some of {sorted(TAGS)}")
    return [
        program
        for program in PROGRAMS
        if any(map(program.has, selections or [""])) and not any(map(program.has, without.split()))
    ]


def program(name: str) -> Program:
    """Return the program of this name."""
    return next(one for one in PROGRAMS if one.name == name)


__all__ = [
    "PROGRAMS",
    "TAGS",
    "Call",
    "Holding",
    "Method",
    "Of",
    "Program",
    "Result",
    "assert_close",
    "copied",
    "drawn",
    "exported",
    "normal",
    "program",
    "programs",
    "saved_and_loaded",
]

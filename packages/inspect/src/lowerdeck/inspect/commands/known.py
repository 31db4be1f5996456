"""Names, distributions and descriptions of the commands of all Lowerdeck packages."""

from __future__ import annotations

COMMANDS = {
    "lower": ("lowerdeck-lowered-module", "compile a PyTorch model to a .pte file"),
    "inspect": ("lowerdeck-inspect", "show what a .pte or .ptd file contains"),
    "verify": ("lowerdeck-inspect", "check whether a file is safe to run"),
    "run": ("lowerdeck-runner", "run a .pte file and show its outputs and timings"),
    "backends": ("lowerdeck-runner", "list installed backends and what each can do"),
    "diff": ("lowerdeck-inspect", "compare two .pte files"),
    "extract": ("lowerdeck-inspect", "write delegates and constants of a file to a folder"),
    "ops": ("lowerdeck-inspect", "list the operators that a .pte file calls"),
    "lm": ("lowerdeck-language-models", "export, quantise and run language models"),
    "doctor": ("lowerdeck-inspect", "check the installation"),
    "completion": ("lowerdeck-inspect", "print a completion script for bash or zsh"),
}
"""Distribution and one-line help of each command. Listed here so that help and errors need not
import other packages, which import torch.
"""

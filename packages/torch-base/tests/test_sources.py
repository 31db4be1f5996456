"""Where a node came from, for an error message."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.fx import Graph

from lowerdeck.torch_base import describe_node, module_path, source_frame, source_frames


def test_a_node_is_told_with_the_innermost_line_outside_torch() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    program = torch.export.export(Model(), (torch.ones(1, 2),))
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.strip().startswith("return self.layer(x)")
    )
    location = f"{Path(__file__).name}:{line})"
    assert describe_node(node).startswith("aten.linear.default (node 'linear', from ")
    assert describe_node(node).endswith(location)


def test_a_node_that_nobody_traced_has_no_line() -> None:
    node = Graph().call_function(torch.relu)
    assert "(node 'relu', from an unknown line)" in describe_node(node)


def test_frames_of_any_text_are_read_and_nothing_is_raised() -> None:
    node = Graph().call_function(torch.relu)
    texts: list[tuple[object, list[tuple[str, int, str, str]]]] = [
        (None, []),
        (7, []),
        ("", []),
        ("nothing of the kind", []),
        ('  File "a.py", line 3, in f', [("a.py", 3, "f", "")]),
        (
            '  File "a.py", line 3, in f\n    x = 1\n  File "b c.py", line 4, in <lambda>\n    y',
            [("a.py", 3, "f", "x = 1"), ("b c.py", 4, "<lambda>", "y")],
        ),
        (
            'File "a.py", line 3, in f\nFile "b.py", line 4, in g\n\n    far below',
            [("a.py", 3, "f", ""), ("b.py", 4, "g", "")],
        ),
        ('  File "a.py", line x, in f\n    code', []),
    ]
    for text, wanted in texts:
        node.meta["stack_trace"] = text
        assert [tuple(frame) for frame in source_frames(node)] == wanted


def test_a_location_reads_as_in_a_traceback() -> None:
    node = Graph().call_function(torch.relu)
    assert source_frame(node) is None
    node.meta["stack_trace"] = '  File "a.py", line 3, in f\n    x = 1'
    frame = source_frame(node)
    assert frame is not None
    assert frame.location == 'File "a.py", line 3, in f'


def test_a_module_is_told_by_its_path() -> None:
    node = Graph().call_function(torch.relu)
    assert module_path(node) == ""
    node.meta["nn_module_stack"] = {
        "L__self__": ("", "Model"),
        "L__self___layers_0": ("L['self'].layers.0", "Layer"),
    }
    assert module_path(node) == "layers.0"

"""Looking at a lowered program."""

from __future__ import annotations

import importlib
import logging

import pytest
import torch

from lowerdeck.lowered_module import (
    WhyNoPartition,
    WhyNoPartitionReporter,
    delegation_summary,
    format_delegated_graph,
    get_delegates,
    get_lowered_submodules,
    get_non_lowered_nodes,
    print_delegated_graph,
    to_backend,
)
from lowerdeck.lowered_module.testing import TaggingPartitioner


class Model(torch.nn.Module):
    """Three operators, the middle one delegated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().tan().cos()


@pytest.fixture
def program() -> torch.export.ExportedProgram:
    exported = torch.export.export(Model(), (torch.ones(2),))
    return to_backend(
        exported, TaggingPartitioner(lambda node: "t" if node.name == "tan" else None)
    )


def test_delegates_and_what_is_left_are_listed(program: torch.export.ExportedProgram) -> None:
    ((name, module, call),) = get_lowered_submodules(program.graph_module)
    (fetched,) = get_delegates(program.graph)
    assert name == fetched.target == "lowered_module_0"
    assert call.args[0] is fetched
    assert module.backend_id == "VerbatimBackend"
    assert [node.name for node in get_non_lowered_nodes(program.graph)] == ["sin", "cos"]


def test_names_of_nodes_do_not_matter(program: torch.export.ExportedProgram) -> None:
    (fetched,) = get_delegates(program.graph)
    fetched.name = "anything"
    assert get_delegates(program.graph) == [fetched]
    assert len(get_lowered_submodules(program.graph_module)) == 1


def test_the_graph_is_printed_with_its_delegates(
    program: torch.export.ExportedProgram, capsys: pytest.CaptureFixture[str]
) -> None:
    print_delegated_graph(program.graph_module)
    text = capsys.readouterr().out
    assert text.strip() == format_delegated_graph(program.graph_module)
    assert "backend_id: VerbatimBackend" in text
    assert text.index("aten.sin") < text.index("aten.tan") < text.index("aten.cos")


def test_the_summary_counts_by_operator(program: torch.export.ExportedProgram) -> None:
    summary = delegation_summary(program)
    assert summary.delegates == {"VerbatimBackend": 1}
    assert summary.delegated == {"aten.tan.default": 1}
    assert summary.left == {"aten.sin.default": 1, "aten.cos.default": 1}
    assert "1 of 3 nodes delegated (33%)" in str(summary)


class Remarking(TaggingPartitioner):
    """Says something of what it takes, and of a node that there is not."""

    remarks = {"done slowly": {"tan": "it is odd", "gone": "nobody"}}  # noqa: RUF012


def test_the_summary_shows_what_a_partitioner_says_of_what_it_took() -> None:
    exported = torch.export.export(Model(), (torch.ones(2),))
    partitioner = Remarking(lambda node: "t" if node.name == "tan" else None)
    summary = delegation_summary(to_backend(exported, partitioner))
    (remark,) = summary.remarks
    assert (remark.node, remark.why) == ("tan", "it is odd")
    assert "done slowly: aten.tan.default at tan: it is odd" in str(summary)


class HalfQuantized(torch.nn.Module):
    """A layer of stored integers, one of floats and a table, each of more than 1 kB."""

    def __init__(self, *, quantized: bool) -> None:
        super().__init__()
        self.quantized = quantized
        self.table, self.layer = torch.nn.Embedding(30, 20), torch.nn.Linear(20, 15)
        self.register_buffer("stored", torch.ones(20, 20, dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.stored.float()
        if self.quantized:
            weight = torch.ops.quantized_decomposed.dequantize_per_tensor.default(
                self.stored, 0.1, 0, -128, 127, torch.int8
            )
        result: torch.Tensor = self.layer((self.table(x) @ weight).sin())
        return result


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("delegated", ["linear", "sin", ""])
def test_the_summary_names_what_stays_float_in_a_quantised_program(
    delegated: str, quantized: bool
) -> None:
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    model, x = HalfQuantized(quantized=quantized), torch.zeros(2, dtype=torch.long)
    # A weight that a partition alone reads goes with it, as it does for every backend.
    tagged = (
        {delegated, "p_layer_weight", "p_layer_bias"} if delegated == "linear" else {delegated}
    )
    lowered = to_backend(
        torch.export.export(model, (x,)),
        TaggingPartitioner(lambda node: "t" if node.name in tagged else None),
    )
    summary = delegation_summary({"forward": lowered})
    named = [
        "stays float: table.weight: 2400 bytes: aten.embedding.default is not quantised",
        "stays float: layer.weight: 1200 bytes: aten.linear.default is not quantised",
    ]
    assert [str(one) for one in summary.float_weights] == (named if quantized else [])
    assert [line for line in str(summary).splitlines() if line.startswith("stays")] == (
        named if quantized else []
    )


def test_reporters_are_each_their_own() -> None:
    one, other = WhyNoPartitionReporter(), WhyNoPartitionReporter()
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    one.report_reject(node, "first reason")
    one.report_reject(node, "second reason")
    assert list(one.reasons.values()) == ["first reason"]
    assert not other.reasons
    assert "first reason" in one.get_table_report()


def test_a_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    node = torch.fx.Graph().placeholder("x")
    with caplog.at_level(logging.DEBUG, logger="a.backend"):
        WhyNoPartition(logging.getLogger("a.backend"))(node, "it is odd")
    assert "x was not partitioned because it is odd" in caplog.text

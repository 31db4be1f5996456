"""Summaries and listings of lowered programs."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch
from lowered_helpers import by_name
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    CompileSpec,
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
from lowerdeck_zoo import Holding, Of, exported

MODEL = Of(lambda x: x.sin().tan().cos())


@pytest.fixture
def program() -> ExportedProgram:
    """Three operators, the middle one delegated."""
    return to_backend(exported(MODEL, torch.ones(2)), by_name({"tan": "t"}))


def test_delegates_and_what_is_left_are_listed(program: ExportedProgram) -> None:
    ((name, module, call),) = get_lowered_submodules(program.graph_module)
    (fetched,) = get_delegates(program.graph)
    assert name == fetched.target == "lowered_module_0"
    assert call.args[0] is fetched
    assert module.backend_id == "VerbatimBackend"
    assert [node.name for node in get_non_lowered_nodes(program.graph)] == ["sin", "cos"]
    # Names of nodes do not matter.
    fetched.name = "anything"
    assert get_delegates(program.graph) == [fetched]


def test_the_graph_is_printed_with_its_delegates(
    program: ExportedProgram, capsys: pytest.CaptureFixture[str]
) -> None:
    print_delegated_graph(program.graph_module)
    text = capsys.readouterr().out
    assert text.strip() == format_delegated_graph(program.graph_module)
    assert "backend_id: VerbatimBackend" in text
    assert text.index("aten.sin") < text.index("aten.tan") < text.index("aten.cos")


def test_the_summary_counts_by_operator(program: ExportedProgram) -> None:
    summary = delegation_summary(program)
    assert summary.delegates == {"VerbatimBackend": 1}
    assert summary.delegated == {"aten.tan.default": 1}
    assert summary.left == {"aten.sin.default": 1, "aten.cos.default": 1}
    assert "1 of 3 nodes delegated (33%)" in str(summary)


class Remarking(TaggingPartitioner):
    """Says something of what it takes, and of a node that there is not."""

    remarks = {"done slowly": {"tan": "it is odd", "gone": "nobody"}}  # noqa: RUF012


def test_the_summary_shows_what_a_partitioner_says_of_what_it_took() -> None:
    partitioner = Remarking(lambda node: "t" if node.name == "tan" else None)
    summary = delegation_summary(to_backend(exported(MODEL, torch.ones(2)), partitioner))
    (remark,) = summary.remarks
    assert (remark.node, remark.why) == ("tan", "it is odd")
    assert "done slowly: aten.tan.default at tan: it is odd" in str(summary)


def half_quantized(*, quantized: bool) -> Of:
    """Return a layer of stored integers, one of floats and a table, each of more than 1 kB."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        weight = self.stored.float()
        if quantized:
            weight = torch.ops.quantized_decomposed.dequantize_per_tensor.default(
                self.stored, 0.1, 0, -128, 127, torch.int8
            )
        return self.layer((self.table(x) @ weight).sin())

    layers = {"table": torch.nn.Embedding(30, 20), "layer": torch.nn.Linear(20, 15)}
    return Of(forward, **layers, stored=torch.ones(20, 20, dtype=torch.int8))


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("delegated", ["linear", "sin", ""])
def test_the_summary_names_what_stays_float_in_a_quantised_program(
    delegated: str, quantized: bool
) -> None:
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    model, x = half_quantized(quantized=quantized), torch.zeros(2, dtype=torch.long)
    # A weight that a partition alone reads goes with it, as it does for every backend.
    tagged = (
        {delegated, "p_layer_weight", "p_layer_bias"} if delegated == "linear" else {delegated}
    )
    lowered = to_backend(exported(model, x), by_name(dict.fromkeys(tagged, "t")))
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


def relus(refused: dict[str, str] | None = None) -> TaggingPartitioner:
    """Return a partitioner that tags each relu by itself, and the reasons for what it leaves."""
    specs = (CompileSpec("mode", b"fast"),)
    made = TaggingPartitioner(
        lambda node: node.name if "relu" in node.name else None, compile_specs=specs
    )
    made.refused = refused or {}
    return made


class Branching(Holding, weight=lambda: torch.nn.Parameter(torch.ones(4))):
    """Two relus, a sum, and a weight."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(x) * self.weight + torch.relu(x.sin())


def test_why_partitioners_refused_stays_with_the_lowered_program() -> None:
    program = exported(Branching(), torch.ones(4))
    lowered = to_backend(program, relus({"sin": "it is a sine"}))
    twice = to_backend(lowered, relus({"sin": "it is no relu"}))
    assert delegation_summary(lowered).reasons == {"aten.sin.default": ("it is a sine",)}
    assert delegation_summary(twice).reasons == {
        "aten.sin.default": ("it is a sine; it is no relu",)
    }
    assert not any("lowerdeck.reject" in node.meta for node in program.graph.nodes)


def test_reasons_are_grouped_by_where_their_chain_begins() -> None:
    program = exported(Of(lambda i: (i.add(1).mul(2).neg(), i.sin(), i.cos())), torch.ones(2))
    note = WhyNoPartition(logging.getLogger(__name__))
    for node in program.graph.nodes:
        if node.name in ("sin", "cos"):
            note(node, "no such operator")
        elif node.op == "call_function":
            note(node, f"input {node.all_input_nodes[0].name}: integers")
    causes = delegation_summary(program).root_causes
    assert [(cause.why, cause.start) for cause in causes] == [
        ("integers", "args_0"),
        ("no such operator", ""),
    ]
    assert str(causes[0]) == "3 nodes: integers, from args_0: add.Tensor, mul.Tensor, neg.default"

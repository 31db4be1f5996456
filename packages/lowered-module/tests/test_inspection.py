"""Summaries, listings and pictures of lowered programs; tests/browser opens the pages."""

from __future__ import annotations

import importlib
import json
import logging
import re
from pathlib import Path
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
    graph_html,
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
    assert str(summary).startswith("VerbatimBackend: 1 delegate, ")
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


HOSTILE = "</script><script>alert(1)</script>"


def data_of(page: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page)
    data: dict[str, Any] = json.loads(found)
    return data


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


@pytest.fixture
def lowered() -> ExportedProgram:
    return to_backend(exported(Branching(), torch.ones(4)), relus())


def test_delegates_are_shown_by_the_nodes_inside_them(lowered: ExportedProgram) -> None:
    data = data_of(graph_html(lowered))
    labels = [node["label"] for node in data["nodes"] if node["kind"] == "op"]
    assert sorted(labels) == [
        "aten::add.Tensor",
        "aten::mul.Tensor",
        "aten::relu",
        "aten::relu",
        "aten::sin",
    ]
    relus = [node for node in data["nodes"] if node["label"] == "aten::relu"]
    assert sorted(node["group"] for node in relus) == [0, 1]
    assert {group["backend"] for group in data["groups"]} == {"VerbatimBackend"}
    assert data["groups"][0]["specs"] == ["mode = b'fast'"]


def test_edges_cross_the_borders_of_delegates(lowered: ExportedProgram) -> None:
    nodes = data_of(graph_html(lowered))["nodes"]
    needs = {
        node["name"]: [nodes[other]["label"] for other in node["needs"]]
        for node in nodes
        if node["kind"] in ("op", "output")
    }
    assert needs["mul"] == ["aten::relu"]
    assert needs["sin"] == ["x"]
    assert sorted(needs["add"]) == ["aten::mul.Tensor", "aten::relu"]
    assert needs["output"] == ["aten::add.Tensor"]
    (product,) = [node for node in nodes if node["name"] == "mul"]
    assert product["constants"] == ["p_weight"]


def test_each_left_out_node_has_its_reason(lowered: ExportedProgram) -> None:
    page = graph_html(lowered, reasons={"sin": HOSTILE}, title=HOSTILE)
    reasons = {n["name"]: n["reason"] for n in data_of(page)["nodes"] if n["kind"] == "op"}
    assert reasons["sin"] == HOSTILE
    assert reasons["mul"] == reasons["add"] == "no partitioner selected it"
    assert reasons["relu"] == reasons["relu_1"] == ""
    assert page.count("<script") == 2


def test_a_reason_that_the_partitioner_reported_is_shown() -> None:
    program = exported(Branching(), torch.ones(4))
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    WhyNoPartitionReporter().report_reject(node, "it is a sine")
    nodes = data_of(graph_html(program))["nodes"]
    assert [n["reason"] for n in nodes if n["name"] == node.name] == ["it is a sine"]


def test_why_partitioners_refused_stays_with_the_lowered_program() -> None:
    program = exported(Branching(), torch.ones(4))
    lowered = to_backend(program, relus({"sin": "it is a sine"}))
    twice = to_backend(lowered, relus({"sin": "it is no relu"}))
    assert delegation_summary(lowered).reasons == {"aten.sin.default": ("it is a sine",)}
    for one, reason in ((lowered, "it is a sine"), (twice, "it is a sine; it is no relu")):
        nodes = data_of(graph_html(one))["nodes"]
        assert [n["reason"] for n in nodes if n["name"] == "sin"] == [reason]
    assert not any("lowerdeck.reject" in node.meta for node in program.graph.nodes)


def test_tags_are_shown_before_they_are_lowered() -> None:
    program = exported(Branching(), torch.ones(4))
    relus()(program)
    data = data_of(graph_html(program))
    assert [group["backend"] for group in data["groups"]] == ["tagged, not lowered"] * 2


def test_branches_are_part_of_the_picture() -> None:
    model = Of(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
    nodes = data_of(graph_html(exported(model, torch.ones(4))))["nodes"]
    labels = [node["label"] for node in nodes]
    assert {"aten::sin", "aten::cos", "cond"} <= set(labels)
    (cond,) = [node for node in nodes if node["label"] == "cond"]
    assert {"aten::sin", "aten::cos"} <= {labels[other] for other in cond["needs"]}


def test_reasons_are_grouped_by_where_their_chain_begins() -> None:
    program = exported(Of(lambda i: (i.add(1).mul(2).neg(), i.sin(), i.cos())), torch.ones(2))
    note = WhyNoPartition(logging.getLogger(__name__))
    for node in program.graph.nodes:
        if node.name in ("sin", "cos"):
            note(node, "no such operator")
        elif node.op == "call_function":
            note(node, f"input {node.all_input_nodes[0].name}: integers")
    summary = delegation_summary(program)
    causes = summary.root_causes
    assert [(cause.why, cause.start) for cause in causes] == [
        ("integers", "args_0"),
        ("no such operator", ""),
    ]
    place = f"the first in {Path(causes[0].source).name}"
    assert str(causes[0]) == (
        f"3 nodes: integers, from args_0: add.Tensor, mul.Tensor, neg.default, {place}"
    )
    # Each reason is printed once, above the table of operators.
    assert [line for line in str(summary).splitlines() if line.startswith("left: ")] == [
        f"left: {cause}" for cause in causes
    ]


def test_a_reason_counts_the_bytes_of_the_weights_that_stay() -> None:
    program = exported(torch.nn.Embedding(1000, 64), torch.tensor([1, 2]))
    note = WhyNoPartition(logging.getLogger(__name__))
    for node in program.graph.nodes:
        if node.op == "call_function":
            note(node, "no such operator")
    (cause,) = delegation_summary(program).root_causes
    assert cause.weight_bytes == 256_000
    assert str(cause).endswith("; 256.00 kB of weights")


def test_assertions_and_sizes_are_not_counted() -> None:
    shapes = {"dynamic_shapes": (({0: torch.export.Dim.DYNAMIC},),)}
    model = Of(lambda x: x.double().sin().view(x.shape[0] * 2))
    program = exported(model, torch.ones(3, 2), **shapes)
    calls = {node.name for node in program.graph.nodes}
    assert {"_assert_tensor_metadata_default", "sym_size_int_1", "mul"} <= calls
    left = delegation_summary(program).left
    assert left == {f"aten.{name}": 1 for name in ("to.dtype", "sin.default", "view.default")}
    nodes = data_of(graph_html(program))["nodes"]
    assert [node["label"] for node in nodes if node["kind"] == "op"] == [
        *("aten::to.dtype", "aten::sin", "aten::view")
    ]
    assert nodes[-2]["needs"] == [0, 2]

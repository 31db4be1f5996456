"""The page of a graph, read as text; tests/browser opens it in a browser."""

import json
import re
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    BackendDetails,
    CompileSpec,
    DelegationSpec,
    Partitioner,
    PartitionResult,
    PreprocessResult,
    WhyNoPartitionReporter,
    delegation_summary,
    register_backend,
    to_backend,
    unregister_backend,
)
from lowerdeck.lowered_module.inspect.graph_page import graph_html

HOSTILE = "</script><script>alert(1)</script>"


def data_of(page: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page)
    data: dict[str, Any] = json.loads(found)
    return data


class PictureBackend(BackendDetails):
    """Compiles anything to its number of nodes."""

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        return PreprocessResult(str(len(edge_program.graph.nodes)).encode())


class ReluPartitioner(Partitioner):
    """Tags each relu by itself."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        tags = {}
        for node in exported_program.graph.find_nodes(
            op="call_function", target=torch.ops.aten.relu.default
        ):
            tags[node.name] = DelegationSpec("PictureBackend", [CompileSpec("mode", b"fast")])
            node.meta["delegation_tag"] = node.name
        return PartitionResult(exported_program, tags)


class Branching(torch.nn.Module):
    """Two relus, a sum, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * self.weight + torch.relu(x.sin())


@pytest.fixture
def lowered() -> ExportedProgram:
    register_backend(PictureBackend)
    try:
        program = torch.export.export(Branching(), (torch.ones(4),))
        return to_backend(program, ReluPartitioner())
    finally:
        unregister_backend("PictureBackend")


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
    assert {group["backend"] for group in data["groups"]} == {"PictureBackend"}
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
    assert reasons["mul"] == reasons["add"] == "no partitioner took it"
    assert reasons["relu"] == reasons["relu_1"] == ""
    assert page.count("<script") == 2


def test_a_reason_that_the_partitioner_reported_is_shown() -> None:
    program = torch.export.export(Branching(), (torch.ones(4),))
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    WhyNoPartitionReporter().report_reject(node, "it is a sine")
    nodes = data_of(graph_html(program))["nodes"]
    assert [n["reason"] for n in nodes if n["name"] == node.name] == ["it is a sine"]


class Refusing(ReluPartitioner):
    """Says why it leaves the sine."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.refused = {"sin": why}


def test_why_partitioners_refused_stays_with_the_lowered_program() -> None:
    register_backend(PictureBackend)
    try:
        program = torch.export.export(Branching(), (torch.ones(4),))
        lowered = to_backend(program, Refusing("it is a sine"))
        twice = to_backend(lowered, Refusing("it is no relu"))
    finally:
        unregister_backend("PictureBackend")
    nodes = data_of(graph_html(lowered))["nodes"]
    assert [n["reason"] for n in nodes if n["name"] == "sin"] == ["it is a sine"]
    assert delegation_summary(lowered).reasons == {"aten.sin.default": ("it is a sine",)}
    nodes = data_of(graph_html(twice))["nodes"]
    assert [n["reason"] for n in nodes if n["name"] == "sin"] == ["it is a sine; it is no relu"]
    assert not any("lowerdeck.reject" in node.meta for node in program.graph.nodes)


def test_tags_are_shown_before_they_are_lowered() -> None:
    program = torch.export.export(Branching(), (torch.ones(4),))
    ReluPartitioner()(program)
    data = data_of(graph_html(program))
    assert [group["backend"] for group in data["groups"]] == ["tagged, not lowered"] * 2


def test_branches_are_part_of_the_picture() -> None:
    class Chooses(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def yes(x: torch.Tensor) -> torch.Tensor:
                return x.sin()

            def no(x: torch.Tensor) -> torch.Tensor:
                return x.cos()

            chosen: torch.Tensor = torch.cond(x.sum() > 0, yes, no, (x,))
            return chosen

    nodes = data_of(graph_html(torch.export.export(Chooses(), (torch.ones(4),))))["nodes"]
    labels = [node["label"] for node in nodes]
    assert {"aten::sin", "aten::cos", "cond"} <= set(labels)
    (cond,) = [node for node in nodes if node["label"] == "cond"]
    assert {"aten::sin", "aten::cos"} <= {labels[other] for other in cond["needs"]}

"""A page that shows a program's graph: what went to which backend, and why the rest did not."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

from torch.export import ExportedProgram

from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.lowered_module.inspect.graph_picture import GraphPicture
from lowerdeck.serializer import html_page


def graph_html(
    program: ExportedProgram,
    *,
    reasons: Mapping[str, str] = MappingProxyType({}),
    title: str = "program",
) -> str:
    """Return a page that shows the graph with each partition in its colour.

    Delegates are shown by the nodes inside them. Tags of a partitioner that were not lowered yet
    are shown as partitions, too. Weights are named with the nodes that read them.

    Args:
        program: The program, before or after :func:`to_backend`.
        reasons: For names of nodes why no partition took them, where the partitioner did not say
            so through a :class:`WhyNoPartitionReporter`.
        title: What to call the program.

    Returns:
        The text of one HTML page that needs no network, to be written as UTF-8.

    Raises:
        LoweringError: It is no exported program.

    Example:
        >>> import torch
        >>> from lowerdeck.lowered_module import graph_html
        >>> program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
        >>> page = graph_html(program, reasons={"relu": "no backend was asked"})
        >>> "no backend was asked" in page
        True
    """
    if not isinstance(program, ExportedProgram):
        raise LoweringError(
            f"found a {type(program).__name__}, expected an exported program: torch.export.export"
        )
    picture = GraphPicture(dict(reasons))
    picture.add_program(program)
    style, script = (
        files(__package__).joinpath(f"graph_page.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js")
    )
    return html_page(picture.data(title), title, script=script, style=style)

"""Pictures of `.pte` files: one HTML page that needs no network, for one file or for two."""

from lowerdeck.serializer.report.changes import method_changes, stored_changes
from lowerdeck.serializer.report.documents import html_diff, html_report
from lowerdeck.serializer.report.embed import clip
from lowerdeck.serializer.report.file_map import Section
from lowerdeck.serializer.report.operators import Contents, contents_of
from lowerdeck.serializer.report.page import html_page
from lowerdeck.serializer.report.pairing import pair_rows
from lowerdeck.serializer.report.payloads import PayloadGraph, PayloadNode, PayloadValue
from lowerdeck.serializer.report.placement import placement_of
from lowerdeck.serializer.report.values import dtype_name, tensor_text

__all__ = [
    "Contents",
    "PayloadGraph",
    "PayloadNode",
    "PayloadValue",
    "Section",
    "clip",
    "contents_of",
    "dtype_name",
    "html_diff",
    "html_page",
    "html_report",
    "method_changes",
    "pair_rows",
    "placement_of",
    "stored_changes",
    "tensor_text",
]

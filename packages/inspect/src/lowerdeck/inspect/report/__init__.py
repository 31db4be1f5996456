"""Pictures of `.pte` files: one HTML page that needs no network, for one file or for two."""

from lowerdeck.inspect.report.changes import method_changes, stored_changes
from lowerdeck.inspect.report.documents import html_diff, html_report
from lowerdeck.inspect.report.embed import clip
from lowerdeck.inspect.report.file_map import Section, Stored, all_stored
from lowerdeck.inspect.report.operators import Contents, contents_of
from lowerdeck.inspect.report.page import html_page
from lowerdeck.inspect.report.pairing import pair_rows
from lowerdeck.inspect.report.payloads import PayloadGraph, PayloadNode, PayloadValue
from lowerdeck.inspect.report.placement import placement_of
from lowerdeck.inspect.report.values import dtype_name, tensor_text, value_text

__all__ = [
    "Contents",
    "PayloadGraph",
    "PayloadNode",
    "PayloadValue",
    "Section",
    "Stored",
    "all_stored",
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
    "value_text",
]

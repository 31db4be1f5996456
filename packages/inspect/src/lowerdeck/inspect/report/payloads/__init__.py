"""Payloads of delegates, in one form for every backend."""

from lowerdeck.inspect.report.payloads.graph import PayloadGraph, PayloadNode, PayloadValue
from lowerdeck.inspect.report.payloads.xnnpack import is_xnnpack, xnnpack_graph

__all__ = ["PayloadGraph", "PayloadNode", "PayloadValue", "is_xnnpack", "xnnpack_graph"]

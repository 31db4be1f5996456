"""Pictures of `.pte` files: one HTML page that needs no network, for one file or for two."""

from lowerdeck.serializer.report.documents import html_diff, html_report
from lowerdeck.serializer.report.page import html_page

__all__ = ["html_diff", "html_page", "html_report"]

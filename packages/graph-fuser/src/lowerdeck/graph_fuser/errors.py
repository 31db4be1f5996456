"""The errors that this package raises."""


class GraphFuserError(Exception):
    """Base of every error that ``lowerdeck.graph_fuser`` raises on purpose."""

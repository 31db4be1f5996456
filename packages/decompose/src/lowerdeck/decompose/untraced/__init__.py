"""Calls that are told without tracing them."""

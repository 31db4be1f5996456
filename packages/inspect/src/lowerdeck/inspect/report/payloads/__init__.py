"""Payloads of delegates in a common form for all backends."""

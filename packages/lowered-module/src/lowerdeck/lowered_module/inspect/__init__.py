"""Inspection of lowered programs."""

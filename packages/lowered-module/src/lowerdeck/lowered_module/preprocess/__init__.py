"""Partitions given to backends, here or elsewhere, and their results kept."""

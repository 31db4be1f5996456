"""Compile partitions in this or other processes, with a cache."""

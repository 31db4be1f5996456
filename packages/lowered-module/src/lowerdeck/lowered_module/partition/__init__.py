"""Partitions cut out of a program, and delegates put in."""

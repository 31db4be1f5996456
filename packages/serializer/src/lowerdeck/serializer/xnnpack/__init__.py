"""Payloads of XNNPACK, the CPU backend of the official runtime: read, write and check."""

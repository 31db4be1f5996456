"""Payloads of XNNPACK, the backend that the official runtime carries: reading and checks."""

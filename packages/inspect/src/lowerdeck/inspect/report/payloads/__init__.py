"""Payloads of delegates, in one form for every backend."""

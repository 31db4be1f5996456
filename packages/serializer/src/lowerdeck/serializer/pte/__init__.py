"""The ``.pte`` file: its schema, decoding and encoding, its segments, reading and writing."""

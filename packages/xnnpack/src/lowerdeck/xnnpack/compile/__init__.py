"""The half that compiles: which nodes go to XNNPACK, and their payload."""

"""The modules that come out."""

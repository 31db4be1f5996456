"""A real backend: files that the official runtime executes with its XNNPACK delegate."""

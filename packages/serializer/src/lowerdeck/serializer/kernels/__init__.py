"""Facts about the kernels of the official runtime."""

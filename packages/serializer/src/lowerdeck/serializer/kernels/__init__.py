"""What is known of the kernels of the official runtime, once for all who ask."""

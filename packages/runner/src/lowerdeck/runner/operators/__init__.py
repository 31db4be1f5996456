"""What runs one instruction: kernels of torch, operators on numbers, views."""

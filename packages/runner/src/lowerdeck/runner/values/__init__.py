"""Tensors and other values of a program: allocation, layout, inputs."""

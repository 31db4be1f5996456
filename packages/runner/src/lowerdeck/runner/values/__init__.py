"""Values of a program: allocation, layout, inputs."""

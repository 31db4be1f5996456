"""The functional IR and the linear IR of a method, and the kernels that they call."""

"""The functional form: values, operations, and the kernels that they are for."""

"""Which kernels become one."""

"""The CUDA targets: Kernel IR to CUDA C++."""

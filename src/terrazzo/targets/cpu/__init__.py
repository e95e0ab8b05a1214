"""The CPU target: Loop IR to C++ with OpenMP."""

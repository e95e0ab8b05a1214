"""Loop IR to Loop IR: which terms become kernels of their own."""

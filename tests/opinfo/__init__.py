"""PyTorch's operator database through Terrazzo."""

"""Tile IR to Kernel IR: what follows from a schedule's bindings."""

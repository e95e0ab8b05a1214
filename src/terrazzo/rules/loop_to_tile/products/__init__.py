"""Schedules of contractions: matrix products and convolutions."""

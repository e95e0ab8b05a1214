"""Schedules of a product of a product, as in attention."""

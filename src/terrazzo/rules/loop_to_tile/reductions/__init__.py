"""Schedules of reductions and scans."""

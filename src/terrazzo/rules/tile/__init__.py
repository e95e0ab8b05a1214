"""Schedules completed into plans: small rules, one decision each."""

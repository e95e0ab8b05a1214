"""Candidates measured on this machine's GPU, and the fastest kept: `terrazzo tune`, and the option `tune`."""

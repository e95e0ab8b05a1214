"""Schedules of axes that are only walked: pointwise kernels, copies, stencils."""

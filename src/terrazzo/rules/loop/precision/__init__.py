"""In which types numbers are stored, multiplied and summed."""

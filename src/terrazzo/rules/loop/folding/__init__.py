"""What is known of indices is not computed."""

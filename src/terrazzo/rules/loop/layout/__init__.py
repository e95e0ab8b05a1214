"""How buffers lie in memory."""

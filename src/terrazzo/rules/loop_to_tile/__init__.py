"""Loop IR to Tile IR: a schedule for every kernel."""

"""When values are made and how long they are kept."""

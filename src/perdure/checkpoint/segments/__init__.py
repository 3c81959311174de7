"""State that grows at one end and is cut at the other, stored as segments that are written once."""

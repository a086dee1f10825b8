"""Change data capture: what was committed to a database, or saved in a folder, enters the log."""

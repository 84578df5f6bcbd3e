"""Jobs: what a command does from end to end."""

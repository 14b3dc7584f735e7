"""Tools that every room may use: errors, durable files, JSON and doors. It imports the standard library only."""

"""What every room may use: errors, durable files, JSON, the doors of rooms. Only the standard library is imported."""

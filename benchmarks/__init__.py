"""What is measured; README.md has the list."""

"""Files of a checkpoint in folders and behind URLs, and how a checkpoint gets its name at once."""

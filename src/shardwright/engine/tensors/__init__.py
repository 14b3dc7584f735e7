"""One parameter: its sharded and its full form, its cut, and its ranks. This room knows no units."""

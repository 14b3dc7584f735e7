"""The sharded tensor of layouts that cut rows: a DTensor whose edits are noticed and whose numbers are global."""

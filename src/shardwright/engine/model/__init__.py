"""What the units of one model share: time, order, agreement, memory, and the hooks that move them."""

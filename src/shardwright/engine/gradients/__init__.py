"""From full gradients to ``.grad``: pack, reduce, deliver. It is not decided here when."""

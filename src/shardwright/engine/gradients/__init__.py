"""From full gradients to ``.grad``: pack, reduce, deliver. The room ``model`` decides when."""

"""Private names of torch, and differences between its versions. Nothing else imports a private name of torch."""

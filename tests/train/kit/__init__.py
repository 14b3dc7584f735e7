"""Models, corpora and runs that tests of the trainer share."""

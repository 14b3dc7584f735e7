"""What users touch. It changes settings and takes modules; a step is run by ``model``."""

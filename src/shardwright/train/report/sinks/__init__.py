"""Sinks for TensorBoard and for services. Each service's package is imported by its own module alone."""

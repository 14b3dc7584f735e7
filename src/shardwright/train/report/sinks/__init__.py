"""Sinks for TensorBoard and for services.

`service` is the base of all services: when one starts, what it gets, how a resumed run goes on. `tensorboard`,
`mlflow_tracking`, `trackio_projects` and `weights_and_biases` are one sink each. Rule: a service's package is imported
by its own file alone.
"""

"""Random programs of users that do what no page shows: hidden outputs, captured parameters, edited gradients and more.

``grammar`` says what a program is and draws one from a seed; ``model`` builds its model; ``running`` trains it beside a
plain one, and judges: a step is equal, or refused by one clear error on every rank. ``search`` runs many and makes
those that fail small: ``python -m tests.engine.hostile --count 1000``. Programs in ``tests/engine/programs`` must be
equal; here they may be refused.
"""

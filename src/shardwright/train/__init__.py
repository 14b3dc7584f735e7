"""The trainer: configuration, models, data and the loop that runs a training job.

``commands`` has the functions of the command line. ``config`` reads a job's settings, ``launch`` starts its processes,
and ``rank`` is one of them. A rank gets samples from ``data``, and a model from ``models`` and ``finetune``.
``parallel`` puts the model on several ranks, ``step`` trains it, ``report`` shows figures, and ``run`` has the files of
the run.

This file stays empty of imports so that the command line can read a configuration without loading torch.
The engine must never import from here.
"""

"""Models of every kind, and what they share: outputs, packed documents, sampling, vocabulary.

`native` has this package's own, `hf` those of transformers, `foreign` modules of other packages and of users. `offers`
says what each kind supports. Models know nothing of sharding, processes or devices: `native/plans.py` and
`native/styles.py` say how tensor parallelism cuts them.

This file stays empty of imports: `presets` must be readable without loading torch.
"""

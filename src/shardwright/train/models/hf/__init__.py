"""Models of transformers, of the kind `hf`.

`transformers_model` makes one from its configuration, `checks` refuses jobs before anything is allocated, `documents`
keeps the documents of a sample apart. Rule: transformers is imported when a model is made, not before.
"""

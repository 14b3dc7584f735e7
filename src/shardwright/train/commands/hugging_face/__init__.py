"""Work on exported folders beyond the weights: files of the byte tokenizer, a push to the hub, tasks of lm-eval.

`export.py` beside this folder writes the weights; nothing here does.
"""

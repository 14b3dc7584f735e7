"""Models of this package, of the kinds `llama` and `hybrid`.

Read `decoder` first: embedding, blocks, output layer. `llama` and `hybrid` derive from it; `mamba` has the
hybrid's Mamba-2 layers. `plans` and `styles` say how tensor parallelism cuts them, `hugging_face_tables` has the names
of other checkpoints. Rule: a model is plain PyTorch and knows no ranks.
"""

"""The sections of CONFIG.toml, one in each file: keys, types, ranges, defaults, meanings. `all` puts them together.

Nothing here imports torch, so that `--help` and a mistyped key are answered at once.
"""

"""Documents in files: where they are, and how each form is read.

`places` makes a list of files of a path, glob or URL. `documents` reads them in order: `lines` text and JSON lines,
`columns` Parquet and Arrow, `numbers` tokens that a file has already, `items` one row. Rule: an error names the file
and the row.
"""

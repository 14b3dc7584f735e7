"""Facts about the package itself: its version and its folder."""

import os

__version__ = "0.2.0"
#: The folder that has the package's files.
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

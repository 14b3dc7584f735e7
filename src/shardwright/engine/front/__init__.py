"""The functions and classes for users. They take modules and change settings; ``model`` runs a step."""

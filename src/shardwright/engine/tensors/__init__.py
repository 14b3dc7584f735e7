"""What one parameter is: its sharded and its full form, how it is cut, and over which ranks. It knows no unit."""

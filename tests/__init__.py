"""The test suite, a package so that worker processes can import test functions by name."""

"""Backends: a file's name is the string that ``backend=`` takes."""

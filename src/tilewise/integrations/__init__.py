"""Faces of other libraries: their names, layouts and conventions, translated into calls of tilewise's own."""

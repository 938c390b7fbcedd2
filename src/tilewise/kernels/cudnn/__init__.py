"""Graphs for cuDNN's attention engines: what they say, how they are built, and what they run on."""

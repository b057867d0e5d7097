"""The show window: a node as its own process, a story told to it over DDS, and a screen."""

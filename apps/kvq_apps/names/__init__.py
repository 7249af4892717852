"""Finds the files of a model by its name: local models, the hub, the package index."""

"""Defines every stored form and what every kernel computes, in numpy."""

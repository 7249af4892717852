"""Fits what is stored to the model: rounding, bits, page encodings, prediction, tuning."""

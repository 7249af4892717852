"""The machine: its processor, its devices, and how to use both fast."""

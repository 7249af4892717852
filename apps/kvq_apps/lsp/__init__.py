"""The Language Server Protocol over standard input and output. Knows editors, and no model."""

"""Code completion inside an edited file: documents, prompts, suggestions. Knows no editor."""

"""Code completion inside an edited file: documents, prompts, drafts. Knows no editor."""

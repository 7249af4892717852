"""Code completion inside an edited file: documents, prompts, drafts, filters. Knows no editor."""

"""From logits to text: sampling, constraints, verification of drafts."""

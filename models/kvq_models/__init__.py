"""Model families as data: what a checkpoint of each supported kind holds and how it computes.

Knows configurations, weight names, rotary tables, tokenizers and a plain numpy forward pass;
knows no generation loop, no sampling, no cache format and no graph.
"""

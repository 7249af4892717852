"""Model families as data: what a checkpoint of each supported kind holds and how it computes.

The package has configurations, weight names, rotary tables, tokenizers, chat templates and a plain
numpy forward pass. It has no generation loop, no sampling, no cache format and no graph.
"""

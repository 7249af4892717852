"""The embedded models: two Hugging Face checkpoints, `default` and `nano`, each in its folder.

Data alone, which `kvq_models.catalogue` finds. A checkout has it beside the code; elsewhere it is
the distribution `kvq-models`.
"""

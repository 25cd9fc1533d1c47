"""Commands that start programs in a good environment: ``bigdl-nano-init`` and its siblings."""

"""Names of BigDL 2.x's ``dllib.feature`` that pipelines of nnframes use."""

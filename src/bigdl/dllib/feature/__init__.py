"""Import paths of BigDL 2.x's ``dllib.feature`` that nnframes pipelines use."""

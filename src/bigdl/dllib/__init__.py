"""Names of BigDL 2.x's ``dllib`` that programs for Orca and Friesian import."""

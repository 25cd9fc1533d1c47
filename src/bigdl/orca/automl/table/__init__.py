"""Search over models of a table: columns and target, models, cross-validation, the estimator."""

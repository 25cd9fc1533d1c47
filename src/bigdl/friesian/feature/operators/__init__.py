"""The operators of tables, as functions of a Spark DataFrame, one module for each family.

An operator that learns from the data is a pair of functions: one returns what it learned, small and
plain, and the other applies it to any DataFrame.  Everything is an expression or a plan of Spark;
where batches measured faster, columns go through Arrow, never row by row.
"""

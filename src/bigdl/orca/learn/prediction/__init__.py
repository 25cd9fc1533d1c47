"""Distributed prediction of every input type with a model that is shipped to tasks."""

"""The engines that run workers on Spark and on Ray."""

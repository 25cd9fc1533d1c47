"""Engines that run workers on Spark, Spark Connect and Ray."""

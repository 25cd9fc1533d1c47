"""Provisioning of Spark and Ray.

``spark.py`` describes the active Spark, ``launch.py`` starts and stops one, ``java.py`` finds the
Java that it runs on, and ``plan.py`` looks at query plans.  For other machines, ``submit.py`` makes
Spark's configuration and command from the arguments, ``environment.py`` ships the Python
environment and the program's modules, and ``standalone.py`` starts a cluster on this machine.
``ray.py`` describes the active Ray, which ``ray_launch.py`` starts on this machine or on Spark's
executors.  ``supervisor.py`` ends what was started when this process is gone.

Only these modules look behind PySpark's and Ray's public interfaces.
"""

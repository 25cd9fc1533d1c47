"""Options of JVMs that live for a minute."""

QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Without the second compiler and parallel collection, which cost tests two fifths of their CPU."""

"""Commands that start programs in an environment tuned for numeric code."""

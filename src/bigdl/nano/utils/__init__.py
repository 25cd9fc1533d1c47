"""Helpers of Nano: :mod:`.common` for all frameworks."""

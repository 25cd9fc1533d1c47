"""Helpers of Nano: :mod:`.common` for all frameworks, and :mod:`.pytorch` and :mod:`.tf`."""

"""Helpers of Nano: :mod:`.common` for all frameworks, :mod:`.pytorch` and :mod:`.tf` for one."""

"""Combinations that cannot work, refused before anything starts. `combinations` is called by
`config.reading`, and calls the others.
"""

from fednet.config.rules.combinations import check, check_method

__all__ = ["check", "check_method"]

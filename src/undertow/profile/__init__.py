"""Measurements of one model in one run, and the files that store them."""

from undertow.profile.profile import Profile, profile_from_file, profile_from_json

__all__ = ["Profile", "profile_from_file", "profile_from_json"]

"""Settings of all tests."""

from hypothesis import settings

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("undertow", deadline=None)
settings.load_profile("undertow")

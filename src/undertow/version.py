"""The version of this library, for modules that must not import all of it."""

__version__ = "0.1.0"

"""`undertow demo`.

Trains one model in five variants or more on this machine, over an emulated link, and compares the
results.
"""

from undertow.lab.demo.run import run_demo
from undertow.lab.demo.settings import DemoSettings

__all__ = ["DemoSettings", "run_demo"]

"""`undertow demo`: one model trained five ways on this machine, or six, over an emulated link, with the answers compared."""

from undertow.demo.run import run_demo
from undertow.demo.settings import DemoSettings, Way

__all__ = ["DemoSettings", "Way", "run_demo"]

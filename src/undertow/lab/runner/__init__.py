"""Runs programs that do not know Undertow, with Undertow's class instead of torch's.

`undertow run` puts the folder `site` at the front of PYTHONPATH and becomes the command. Every
Python process that inherits the environment imports `site/sitecustomize.py` first, which redirects
torch's class as soon as torch defines it.
"""

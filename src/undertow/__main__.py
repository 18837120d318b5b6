"""`python -m undertow`.

The command, or a script that runs as under `undertow run`, for `torchrun ... -m undertow train.py`.
"""

import sys

from undertow.lab.cli import main

if sys.argv[1:] and (sys.argv[1].endswith(".py") or sys.argv[1] in ("-m", "-c")):
    # options before "-m undertow", such as -u
    of_python = sys.orig_argv[1 : -len(sys.argv[1:]) - 2]
    sys.argv[1:1] = ["run", sys.executable, *of_python]
main()

"""Systems in turn over a real shaped link: one rank in each network namespace, whole steps.

`contenders` names the systems, `systems` has a module for each kind, `workloads` the models. `rounds` lets a `session` of live
ranks take its turns; each `rank` compares its system with `truth` before it is timed. `part` is what `make bench` measures.
"""

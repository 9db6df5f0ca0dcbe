"""Environments: what is played, how, and how it is graded.

environment         the class `Environment`, which users' Python subclasses, and an episode as its methods see it
code                coding tasks of a dataset, and foreign Harbor folders
edits               edits to apply, without a box
environment_tools   the tools of users' environments
taskset             the tasks of a run, of one environment or a mixture
"""

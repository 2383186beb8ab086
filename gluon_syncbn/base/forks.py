"""Handlers of forks, in lists that can be emptied again.

The interpreter holds what `os.register_at_fork` is given until its very end, and with it all that the globals of its
module refer to. If MXNet's tables of operators were among that, they would outlive the rest of Python, and a process
whose last arrays remember a Python operator would end in a segmentation fault. So the interpreter is given the
functions of this module, which imports nothing (not even `typing`, whose caches have classes of MXNet's in them), and
whoever adds handlers (`step.exits`) removes them when the process exits.
"""

before: list = []  # called without arguments
after: list = []  # called with whether the process is the child


def before_fork() -> None:
    for handler in before:
        handler()


def after_fork_in_parent() -> None:
    for handler in after:
        handler(False)


def after_fork_in_child() -> None:
    for handler in after:
        handler(True)

"""Handlers of forks, in a list that can be emptied again.

The interpreter holds what `os.register_at_fork` is given until its very end, and with it all that the globals of its
module refer to. If MXNet's tables of operators were among that, they would outlive the rest of Python, and a process
whose last arrays remember a Python operator would end in a segmentation fault. So the interpreter is given the
functions of this module, which imports nothing (not even `typing`, whose caches have classes of MXNet's in them), and
whoever adds handlers (`step.exits`) removes them when the process exits.
"""

handlers: list = []  # pairs: before a fork, without arguments; after it, with whether the process is the child


def before_fork() -> None:
    for before, _ in handlers:
        before()


def after_fork_in_parent() -> None:
    for _, after in handlers:
        after(False)


def after_fork_in_child() -> None:
    for _, after in handlers:
        after(True)

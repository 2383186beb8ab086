"""Handlers of forks, in a list that can be emptied again.

Until its very end the interpreter holds the functions that `os.register_at_fork` gets, with the globals of their
modules and all objects to which these refer. If MXNet's tables of operators were among these, a process whose last
arrays remember a Python operator would end in a segmentation fault. So `step.exits` registers the functions of this
module, which imports nothing (not even `typing`, whose caches have classes of MXNet in them), and empties the list when
the process exits.
"""

handlers: list = []  # pairs of functions: before() runs before a fork, after(is_child) after it


def before_fork() -> None:
    for before, _ in handlers:
        before()


def after_fork_in_parent() -> None:
    for _, after in handlers:
        after(False)


def after_fork_in_child() -> None:
    for _, after in handlers:
        after(True)

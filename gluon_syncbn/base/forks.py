"""What the interpreter calls before a fork and behind it, and holds until its very end.

So nothing is imported here before it is needed: what this module refers to would outlive the rest of Python, MXNet's
tables of operators among it, and a process whose last arrays remember a Python operator would end in a segmentation
fault.
"""


def before_fork() -> None:
    from gluon_syncbn.step import exits as lifecycle

    lifecycle.before_fork()


def after_fork_in_parent() -> None:
    from gluon_syncbn.step import exits as lifecycle

    lifecycle.after_fork(is_child=False)


def after_fork_in_child() -> None:
    from gluon_syncbn.step import exits as lifecycle

    lifecycle.after_fork(is_child=True)

"""The check that MXNet is installed, before this package imports it."""

from importlib import metadata


def check_mxnet() -> None:
    """Import MXNet. ImportError, with the command that helps, if it is missing, or does not work with this NumPy."""
    try:
        import mxnet  # noqa: F401
    except AttributeError as problem:  # names that newer versions of NumPy lack
        raise ImportError(
            f"gluon_syncbn: MXNet cannot be imported with NumPy {metadata.version('numpy')} (another package may have "
            f"replaced an older one). Run: pip install 'numpy<1.24'"
        ) from problem
    except ModuleNotFoundError as problem:
        if problem.name != "mxnet":
            raise
        raise ImportError(
            "gluon_syncbn: MXNet is not installed. Run: pip install 'mxnet==1.9.1' 'numpy<1.24', or for GPUs "
            "mxnet-cu117 or mxnet-cu112 in place of mxnet."
        ) from problem

"""Python imports this when it starts: MXNet does without what it need not have, which takes most of its import.

It writes a function for each operator, and compiles all 2,340 of them. Here each is compiled when it is called for the
first time, and is from then on what it would have been. What MXNet downloads with is not there.
"""

import sys
from importlib.machinery import PathFinder, SourceFileLoader
from types import FunctionType, ModuleType


def compiled_when_called(source, _, made):
    """In place of ``exec(source, None, made)`` in the modules that write the functions."""
    name = source.split("def ", 1)[1].split("(", 1)[0]
    made[name] = function = FunctionType(not_yet.__code__, sys._getframe(1).f_globals, name)
    function.__kwdefaults__ = {"_become": lambda: become(function, source)}


def not_yet(*args, _become, **kwargs):
    return _become()(*args, **kwargs)


def become(function, source):
    made = {}
    # Not of the text itself, by which Python would forget that Ctrl-C has ended it, where this is called at exit.
    exec(compile(source, "<string>", "exec"), function.__globals__, made)
    (compiled,) = made.values()
    function.__defaults__ = compiled.__defaults__  # first: another thread may call it as soon as it has its code
    function.__code__, function.__kwdefaults__ = compiled.__code__, None
    return function


class Loader(SourceFileLoader):
    def exec_module(self, module):
        module.exec = compiled_when_called
        super().exec_module(module)


class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name not in ("mxnet.ndarray.register", "mxnet.symbol.register"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        spec.loader = Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
sys.modules.update(dict.fromkeys(("cv2", "onnx", "scipy.stats", "sklearn")))  # an import of None is an ImportError
sys.modules["requests"] = ModuleType("requests")
